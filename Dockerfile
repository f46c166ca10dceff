# docker build -t ckptfix . && docker run --rm -v "$PWD:/data" -u "$(id -u)" ckptfix check model.pth
FROM python:3.12-slim AS build
# The compiler is for the kernel of the value scan, and stays in this stage: any version of it will do.
# hadolint ignore=DL3008
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
COPY constraints.txt /tmp/
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c /tmp/constraints.txt /wheels/*.whl
RUN useradd --create-home --uid 1000 ckptfix
# As a number, so that a cluster can see that it is not root.
USER 1000
WORKDIR /data
ENTRYPOINT ["ckptfix"]
