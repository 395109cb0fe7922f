"""File systems that refuse something: a library for LD_PRELOAD, compiled from C.

Below a folder named `noflock`, flock answers ENOSYS, as on Lustre without its mount option; below
one named `nolinks`, link answers EPERM too, as on file systems without hard links. Below
`norename`, `nofsync` and `nosymlink`, these calls answer ENOSYS, EINVAL and EPERM.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int flock(int fd, int op) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n > 0) {
    path[n] = 0;
    if (strstr(path, "/noflock/") || strstr(path, "/nolinks/")) { errno = ENOSYS; return -1; }
  }
  return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(fd, op);
}

int link(const char *from, const char *to) {
  if (strstr(to, "/nolinks/")) { errno = EPERM; return -1; }
  return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "link"))(from, to);
}

int rename(const char *from, const char *to) {
  if (strstr(to, "/norename/")) { errno = ENOSYS; return -1; }
  return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}

int symlink(const char *to, const char *from) {
  if (strstr(from, "/nosymlink/")) { errno = EPERM; return -1; }
  return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "symlink"))(to, from);
}

int fsync(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n > 0) {
    path[n] = 0;
    if (strstr(path, "/nofsync/")) { errno = EINVAL; return -1; }
  }
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}

int linkat(int d, const char *from, int e, const char *to, int flags) {
  if (strstr(to, "/nolinks/")) { errno = EPERM; return -1; }
  return ((int (*)(int, const char *, int, const char *, int))dlsym(RTLD_NEXT, "linkat"))(
      d, from, e, to, flags);
}
"""


def compiled(folder: Path) -> Path:
    """The library, made in `folder`. Raises FileNotFoundError without a C compiler."""
    source, library = folder / "refusing_files.c", folder / "refusing_files.so"
    source.write_text(SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60
    )
    return library
