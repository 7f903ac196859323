# gradmm with the packages of constraints.txt, for a user without privileges: docs/operations/containers.md.
FROM python:3.11-slim-bookworm AS build

# Another index beside the usual one, for another build of torch.
ARG PIP_EXTRA_INDEX_URL
# Names from pyproject.toml, with commas: discrete,s3
ARG EXTRAS

WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/gradmm \
    && /opt/gradmm/bin/pip install --disable-pip-version-check -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.11-slim-bookworm

# A new volume takes owner and mode of the folder that it is mounted on.
RUN useradd --create-home --uid 10001 gradmm \
    && install -d -o gradmm -g gradmm -m 0700 \
        /work /work/gradmm-root /home/gradmm/.prefect /home/gradmm/.cache /home/gradmm/.cache/huggingface
COPY --from=build /opt/gradmm /opt/gradmm
# Prefect's server copies its pages somewhere before it serves them: by default into its own package.
ENV PATH=/opt/gradmm/bin:$PATH PYTHONUNBUFFERED=1 DO_NOT_TRACK=1 PREFECT_SERVER_UI_STATIC_DIRECTORY=/tmp/prefect-ui

USER 10001
WORKDIR /work
VOLUME /work/gradmm-root
ENTRYPOINT ["gradmm"]
CMD ["--help"]
