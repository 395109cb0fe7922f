#!/bin/sh
# Install Debian's Chromium and its driver for the tests. Needs root.
set -e
type chromium chromedriver > /dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] || { echo "Chromium is not installed, and only root can: tests/browser/install.sh" >&2; exit 1; }
type apt-get > /dev/null 2>&1 || { echo "Chromium is not installed, and there is no apt-get" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends chromium chromium-driver fonts-dejavu-core
