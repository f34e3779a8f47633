# The engine: docker build -f images/engine.Dockerfile .
# Of BASE (Debian) only apt and Python (3.11 or newer, with venv) are used. torch brings CUDA's
# libraries along: the image has about 7 GB. `--target thin` leaves all packages out; they are
# then mounted at /opt/pdcluster/packages, from the same minor version of Python.
ARG BASE=python:3.12-slim

FROM ${BASE} AS packages
# Modules are compiled here, and trusted as they are: nothing can write beside them later.
# Some packages carry files of other Pythons, which can't be compiled and never are imported.
# A mirror and a certificate authority, where the builder needs them.
ARG PIP_INDEX_URL
ARG PIP_CERT
COPY requirements/engine.lock /build/
RUN python3 -m venv /build/venv \
 && /build/venv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile \
      --no-deps --require-hashes --only-binary :all: \
      --target /opt/pdcluster/packages -r /build/engine.lock \
 && rm -rf /opt/pdcluster/packages/bin \
 && { python3 -m compileall -qq --invalidation-mode unchecked-hash /opt/pdcluster/packages || :; }

FROM ${BASE} AS compiled
RUN apt-get update -qq \
 && apt-get install -qq --yes --no-install-recommends g++ > /dev/null \
 && rm -rf /var/lib/apt/lists/*
COPY runtime/pd_engine/__init__.py runtime/pd_engine/build.py /opt/pdcluster/lib/pd_engine/
COPY runtime/pd_engine/attention/csrc /opt/pdcluster/lib/pd_engine/attention/csrc
COPY runtime/pd_engine/kv/csrc /opt/pdcluster/lib/pd_engine/kv/csrc
RUN PYTHONPATH=/opt/pdcluster/lib python3 -m pd_engine.build

FROM ${BASE} AS code
COPY proto/pd_proto /opt/pdcluster/lib/pd_proto
COPY runtime/pd_core /opt/pdcluster/lib/pd_core
COPY runtime/pd_engine /opt/pdcluster/lib/pd_engine
COPY --from=compiled /opt/pdcluster/lib/pd_engine/built /opt/pdcluster/lib/pd_engine/built
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/pdcluster/lib

FROM ${BASE} AS thin
RUN apt-get update -qq \
 && apt-get install -qq --yes --no-install-recommends libgomp1 > /dev/null \
 && rm -rf /var/lib/apt/lists/* /usr/share/python-wheels /usr/lib/python3*/ensurepip \
      /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/pip* \
      /usr/local/bin/pip* \
 && echo 'pdcluster:x:65532:65532::/home/pdcluster:/usr/sbin/nologin' >> /etc/passwd \
 && mkdir -p /home/pdcluster /opt/pdcluster/packages && chown 65532:65532 /home/pdcluster \
 && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 && rm -f /bin/bash /bin/dash /bin/rbash /bin/sh
COPY --from=code /opt/pdcluster/lib /opt/pdcluster/lib
ENV PYTHONPATH=/opt/pdcluster/lib:/opt/pdcluster/packages \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/home/pdcluster
USER 65532:65532
WORKDIR /home/pdcluster
ENTRYPOINT ["python", "-m", "pd_engine"]

FROM thin
COPY --from=packages /opt/pdcluster/packages /opt/pdcluster/packages
