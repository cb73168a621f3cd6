# syntax=docker/dockerfile:1
# Three images, by target: coordinator (no torch), cpu, cuda.
#   docker build --target cuda -t outrider:0.2.0-cuda .
# What RUN does is in scripts/image, so that the tests can do it too.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY scripts/image scripts/image

# Each variant's dependencies are a stage, and in its image a layer, of their own: a change of sources keeps it, and torch with it.
FROM build AS dependencies-coordinator
RUN scripts/image/install_packages.sh /opt/outrider/env coordinator dependencies

FROM dependencies-coordinator AS build-coordinator
COPY README.md LICENSE ./
COPY outrider outrider
COPY coordinator coordinator
COPY draft_service draft_service
COPY target_service target_service
RUN scripts/image/install_packages.sh /opt/outrider/env coordinator project \
 && scripts/image/check_packages.sh /opt/outrider/env coordinator \
 && scripts/image/collect_project.sh /opt/outrider /opt/project

FROM build AS dependencies-cpu
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN TORCH_INDEX_URL=${TORCH_INDEX_URL} scripts/image/install_packages.sh /opt/outrider/env cpu dependencies

FROM dependencies-cpu AS build-cpu
COPY README.md LICENSE ./
COPY outrider outrider
COPY coordinator coordinator
COPY draft_service draft_service
COPY target_service target_service
RUN scripts/image/install_packages.sh /opt/outrider/env cpu project \
 && scripts/image/check_packages.sh /opt/outrider/env cpu \
 && scripts/image/link_pair.sh /opt/outrider/env /opt/outrider/pair \
 && scripts/image/collect_project.sh /opt/outrider /opt/project

FROM build AS dependencies-cuda
RUN scripts/image/install_packages.sh /opt/outrider/env cuda dependencies

FROM dependencies-cuda AS build-cuda
COPY README.md LICENSE ./
COPY outrider outrider
COPY coordinator coordinator
COPY draft_service draft_service
COPY target_service target_service
RUN scripts/image/install_packages.sh /opt/outrider/env cuda project \
 && scripts/image/check_packages.sh /opt/outrider/env cuda \
 && scripts/image/link_pair.sh /opt/outrider/env /opt/outrider/pair \
 && scripts/image/collect_project.sh /opt/outrider /opt/project

# What all images share: an unprivileged user, no shell profile, a health check. scripts/release.sh adds labels of version and
# commit: from here they would make the compiler's layer anew.
FROM ${PYTHON_IMAGE} AS base
LABEL org.opencontainers.image.title="Outrider" \
      org.opencontainers.image.description="Speculative decoding as gRPC microservices" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/outrider/env/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/outrider \
    HF_HOME=/var/cache/outrider/huggingface \
    TRITON_CACHE_DIR=/var/cache/outrider/triton
COPY scripts/image/healthy.py scripts/image/download_model.py /opt/outrider/
RUN install -d -o 10001 -g 10001 /var/cache/outrider
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "/opt/outrider/healthy.py"]
USER 10001:10001

FROM base AS coordinator
COPY --from=dependencies-coordinator /opt/outrider /opt/outrider
COPY --from=build-coordinator /opt/project /opt/outrider
EXPOSE 8000 50050
CMD ["outrider", "coordinator", "--host=0.0.0.0"]

FROM base AS cpu
COPY --from=dependencies-cpu /opt/outrider /opt/outrider
COPY --from=build-cpu /opt/project /opt/outrider
EXPOSE 8000 50050 50051 50052
CMD ["outrider", "serve", "/opt/outrider/pair/target", "--draft-model=/opt/outrider/pair/draft", "--host=0.0.0.0"]

# torch brings CUDA's libraries with it; the driver comes from the node.
FROM base AS cuda
USER root
COPY scripts/image/install_compiler.sh /opt/outrider/install_compiler.sh
RUN /opt/outrider/install_compiler.sh
USER 10001:10001
COPY --from=dependencies-cuda /opt/outrider /opt/outrider
COPY --from=build-cuda /opt/project /opt/outrider
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50051 50052
CMD ["outrider", "--help"]
