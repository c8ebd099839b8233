# shellcheck shell=bash
for file in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/modules.sh /etc/profile.d/lmod.sh; do
  type module >/dev/null 2>&1 || [ ! -r "$file" ] || . "$file" || true
done
