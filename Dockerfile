# syntax=docker/dockerfile:1.7@sha256:a57df69d0ea827fb7266491f2813635de6f17269be881f696fbfdf2d83dda33e
# The worker's image: one static-enough binary on a small Debian, run by a user that owns nothing.

FROM rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1 AS build
WORKDIR /src
COPY . .
# Cargo features beyond what is shipped, such as `otlp`: docker build --build-arg FEATURES=otlp .
ARG FEATURES=""
# Caches outlive the layer, so a change of one file rebuilds one crate. --locked: exactly the versions that were tested.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked --bin sluicegate --features "$FEATURES" && cp target/dist/sluicegate /sluicegate

FROM debian:12.11-slim@sha256:b1a741487078b369e78119849663d7f1a5341ef2768798f7b7406c4240f86aef
# Requests to providers are verified against the system's certificates.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /var/lib/sluicegate sluicegate
COPY --from=build /sluicegate /usr/local/bin/sluicegate
USER 10001
WORKDIR /var/lib/sluicegate
ENTRYPOINT ["/usr/local/bin/sluicegate"]
CMD ["run"]
