#!/bin/sh
# Install Debian's Slurm for the tests, without starting its services. Needs root.
set -e
type slurmctld slurmd munged sbatch > /dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] || { echo "Slurm is not installed, and only root can: tests/slurm/install.sh" >&2; exit 1; }
type apt-get > /dev/null 2>&1 || { echo "Slurm is not installed, and there is no apt-get" >&2; exit 1; }
rule=/usr/sbin/policy-rc.d
if [ ! -e $rule ]; then
    trap 'rm -f $rule' EXIT
    printf '#!/bin/sh\nexit 101\n' > $rule
    chmod 755 $rule
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge
