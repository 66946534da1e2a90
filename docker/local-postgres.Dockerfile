# Debian's PostgreSQL, to be used as the official image is: POSTGRES_DB, POSTGRES_PASSWORD, and data
# in /var/lib/postgresql/data. BASE_IMAGE has the package postgresql:
#     docker/local-base-from-host.sh local/postgres-base postgresql
#     docker build --build-arg BASE_IMAGE=local/postgres-base -t local/postgres - <docker/local-postgres.Dockerfile
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN echo "postgres:x:999:" >>/etc/group \
    && echo "postgres:x:999:999::/var/lib/postgresql:/bin/sh" >>/etc/passwd \
    && ln -s /usr/lib/postgresql/*/bin /usr/local/postgresql \
    && mkdir -p /var/lib/postgresql/data /var/run/postgresql \
    && chown postgres:postgres /var/lib/postgresql/data /var/run/postgresql
ENV PATH=/usr/local/postgresql:$PATH PGDATA=/var/lib/postgresql/data
USER postgres
CMD [ -s "$PGDATA/PG_VERSION" ] || { \
        echo "$POSTGRES_PASSWORD" >/tmp/password \
        && initdb --username postgres --auth-host scram-sha-256 --auth-local trust --pwfile /tmp/password \
        && echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf" \
        && echo "CREATE DATABASE \"$POSTGRES_DB\"" | postgres --single -j template1; \
    } && exec postgres -c listen_addresses='*'
