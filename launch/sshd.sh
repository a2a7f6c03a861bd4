#!/usr/bin/env bash
# What a container runs on each host of a cluster: an sshd for launchers to start ranks through. It needs no root.
#
#   ssh-keygen -q -t rsa -N '' -f keys/id_rsa       # once; the folder `keys` then goes to every host
#   docker run -d --name ringtrain --network host -v $PWD/keys:/keys:ro ringtrain launch/sshd.sh [PORT]
#   docker exec ringtrain horovodrun -np 8 -H host1:4,host2:4 python -m ringtrain.train
#
# The pair in keys/ is the cluster's: whoever has it gets in, and a host that does not have it is not believed.
# Where ~/.ssh/id_rsa is there already, as in Kubernetes' MPI Operator, that one is taken.

set -euo pipefail

PORT=${1:-2222}             # another one than the image's ssh_config has is to be told to every launcher as well
KEY=$HOME/.ssh/id_rsa

if [[ ! -r $KEY ]]; then
    if [[ ! -r /keys/id_rsa || ! -r /keys/id_rsa.pub ]]; then
        echo "sshd.sh: user $(id -u) can read neither $KEY nor /keys/id_rsa and /keys/id_rsa.pub: mount the cluster's" \
            "keys with -v \$PWD/keys:/keys:ro, owned by that user" >&2
        exit 2
    fi
    install -d -m 700 "$HOME/.ssh"
    install -m 600 /keys/id_rsa /keys/id_rsa.pub "$HOME/.ssh"
fi

# StrictModes: in a mounted folder, owners and modes are the mount's. SetEnv: mpirun's helper and ranks find what this
# container finds.
exec /usr/sbin/sshd -D -e -f /dev/null -p "$PORT" -h "$KEY" \
    -o AuthorizedKeysFile="$KEY.pub" -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o UsePAM=no \
    -o StrictModes=no -o PidFile=none \
    -o SetEnv="PATH=$PATH${OPAL_PREFIX:+ OPAL_PREFIX=$OPAL_PREFIX}"
