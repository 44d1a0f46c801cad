#!/bin/sh
# Run once, when the database's volume is made. The workers' own role owns the schema and is no superuser; the others
# are those that PostgREST switches to, and the migrations grant to them.
set -eu
psql --set ON_ERROR_STOP=1 --set worker="$WORKER_PASSWORD" --set authenticator="$AUTHENTICATOR_PASSWORD" \
    --set database="$POSTGRES_DB" --username "${POSTGRES_USER:-postgres}" --dbname "$POSTGRES_DB" <<'SQL'
create role turnkeeper login password :'worker';
grant create on database :"database" to turnkeeper;
create role anon nologin;
create role authenticated nologin;
create role service_role nologin bypassrls;
create role authenticator login noinherit password :'authenticator';
grant anon, authenticated, service_role to authenticator;
SQL
