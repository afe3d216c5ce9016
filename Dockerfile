# docker build -t aiodatadist . && docker run --rm aiodatadist
# The compiler stays in the first stage; the second has Python, the package and what it needs, and is not root.
ARG PYTHON=3.11

FROM python:${PYTHON} AS build
COPY . /src
RUN pip wheel --no-cache-dir --wheel-dir /wheels "/src[demo]" \
    && python -m venv /opt/aiodatadist \
    && /opt/aiodatadist/bin/pip install --no-cache-dir --no-index --find-links /wheels "aiodatadist[demo]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/aiodatadist /opt/aiodatadist
RUN useradd --create-home --uid 1000 aiodatadist
ENV PATH=/opt/aiodatadist/bin:$PATH
USER aiodatadist
WORKDIR /home/aiodatadist
CMD ["aiodatadist", "demo"]
