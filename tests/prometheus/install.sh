#!/bin/sh
# Install Debian's Prometheus for the tests, without starting its service. Needs root.
set -e
type prometheus promtool > /dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] || { echo "Prometheus is not installed, and only root can: tests/prometheus/install.sh" >&2; exit 1; }
type apt-get > /dev/null 2>&1 || { echo "Prometheus is not installed, and there is no apt-get" >&2; exit 1; }
rule=/usr/sbin/policy-rc.d
if [ ! -e $rule ]; then
    trap 'rm -f $rule' EXIT
    printf '#!/bin/sh\nexit 101\n' > $rule
    chmod 755 $rule
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends prometheus
