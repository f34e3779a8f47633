# The router: docker build -f images/router.Dockerfile .
# Of BASE only Python (3.11 or newer, with venv) is used.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# Modules are compiled here, and trusted as they are: nothing can write beside them later.
# A mirror and a certificate authority, where the builder needs them.
ARG PIP_INDEX_URL
ARG PIP_CERT
COPY requirements/router.lock /build/
RUN python3 -m venv /build/venv \
 && /build/venv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile \
      --no-deps --require-hashes --only-binary :all: \
      --target /opt/pdcluster/packages -r /build/router.lock \
 && rm -rf /opt/pdcluster/packages/bin \
 && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/pdcluster/packages
COPY proto/pd_proto /opt/pdcluster/lib/pd_proto
COPY runtime/pd_core /opt/pdcluster/lib/pd_core
COPY runtime/pd_router /opt/pdcluster/lib/pd_router
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/pdcluster/lib

FROM ${BASE}
RUN rm -rf /usr/share/python-wheels /usr/lib/python3*/ensurepip \
      /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/pip* \
      /usr/local/bin/pip* \
 && echo 'pdcluster:x:65532:65532::/home/pdcluster:/usr/sbin/nologin' >> /etc/passwd \
 && mkdir -p /home/pdcluster && chown 65532:65532 /home/pdcluster \
 && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 && rm -f /bin/bash /bin/dash /bin/rbash /bin/sh
COPY --from=build /opt/pdcluster/packages /opt/pdcluster/packages
COPY --from=build /opt/pdcluster/lib /opt/pdcluster/lib
ENV PYTHONPATH=/opt/pdcluster/lib:/opt/pdcluster/packages \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/home/pdcluster
USER 65532:65532
WORKDIR /home/pdcluster
ENTRYPOINT ["python", "-m", "pd_router"]
