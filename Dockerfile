# One image for everything that Trimtab runs: operator, webhook, picker, sidecar, and the emulated engines of the demo.
#
# One and not four, because they are one Python package that shares nearly all of its dependencies: each of four images
# would hold most of this one, a node with a picker and a sidecar would pull it twice, and an upgrade could leave parts
# of different releases talking to each other. What a container is, its command says: trimtab-operator, trimtab-extproc,
# trimtab-sidecar, python -m trimtab_lab.emulator.
#
#   docker build -t registry.example.com/trimtab:0.1.0 .
#
# BASE        what it runs on: Debian or like it, with python3 >= 3.11
# BUILD_BASE  the same with python3's venv; a C compiler is installed where it has none
# RUST        has rustup's and cargo's folders in /usr/local. An image without them, whatever else is in it, makes one
#             without the native core and front: slower, otherwise the same
#
# A wheel made elsewhere takes the place of the stage of that name, and then neither RUST nor a C compiler is needed:
# --build-context wheel=FOLDER, with the wheel in FOLDER/wheels.
ARG BASE=docker.io/library/python:3.13-slim-trixie
ARG BUILD_BASE=docker.io/library/python:3.13-trixie
ARG RUST=docker.io/library/rust:1.95-slim-trixie

FROM ${RUST} AS rust

# What the package depends on: changes seldom, so it is a layer of its own.
FROM ${BUILD_BASE} AS dependencies
ENV PATH=/opt/build/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1
COPY images/*.txt /src/images/
RUN python3 -m venv /opt/build && pip install --quiet --require-hashes -r /src/images/build-requirements.txt
RUN python3 -m venv --without-pip /opt/trimtab && \
    pip --python /opt/trimtab/bin/python install --quiet --no-compile --no-deps --require-hashes --only-binary :all: \
        -r /src/images/requirements.txt
# Containers have read-only file systems, so modules are compiled here; not the thousand of Kubernetes' models, which
# nobody imports. Tests and stubs go.
RUN cd /opt/trimtab/lib/python3*/site-packages && \
    find . -type d -name tests -prune -exec rm -rf {} + && find . -name '*.pyi' -delete && \
    python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/kubernetes/.*/(models|api)/' . && \
    find . -type d -path './kubernetes/*' \( -name docs -o -name test \) -prune -exec rm -rf {} +

FROM dependencies AS wheel
RUN command -v cc >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev; }
COPY --from=rust /usr/local/ /usr/local/
ENV PATH=/usr/local/cargo/bin:$PATH RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/var/cache/cargo
COPY pyproject.toml setup.py MANIFEST.in README.md /src/
COPY core /src/core
COPY extproc /src/extproc
COPY state /src/state
COPY sidecar /src/sidecar
COPY operator /src/operator
COPY lab /src/lab
COPY cli /src/cli
RUN --mount=type=cache,target=/var/cache/cargo \
    --mount=type=cache,target=/src/core/native/target \
    --mount=type=cache,target=/src/extproc/native/target \
    cd /src && pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels .

FROM dependencies AS package
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/trimtab/bin/python install --quiet --no-warn-script-location --no-compile --no-deps --root /package /wheels/*.whl && \
    python3 -m compileall -q --invalidation-mode unchecked-hash -s /package -p / /package
# A native module that could not be built, or does not load here, must not go unnoticed.
RUN cp -a /package/. / && cd /opt/trimtab/lib/python3*/site-packages && \
    ! grep -s . trimtab_*/_*_failed.txt && \
    for module in trimtab_core/_native trimtab_extproc/_front; do \
        ! ls $module.*so 2>/dev/null || /opt/trimtab/bin/python -c "import $(echo $module | tr / .)" || exit 1; \
    done && \
    cd / && /opt/trimtab/bin/python -m trimtab_core.selection && /opt/trimtab/bin/trimtab --help >/dev/null

FROM ${BASE}
LABEL org.opencontainers.image.title=trimtab \
      org.opencontainers.image.description="Scheduler for LLM inference on Kubernetes"
COPY --from=dependencies /opt/trimtab /opt/trimtab
COPY --from=package /package/ /
ENV PATH=/opt/trimtab/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Nobody's, and the one that manifests ask for.
USER 65532:65532
WORKDIR /tmp
CMD ["trimtab", "--help"]
