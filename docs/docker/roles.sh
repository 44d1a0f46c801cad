#!/bin/sh
# The roles that PostgREST switches to; run once, when the database's volume is made. The migrations grant to them.
set -eu
psql -v ON_ERROR_STOP=1 -v password="$AUTHENTICATOR_PASSWORD" --username postgres --dbname "$POSTGRES_DB" <<'SQL'
create role anon nologin;
create role authenticated nologin;
create role service_role nologin bypassrls;
create role authenticator login noinherit password :'password';
grant anon, authenticated, service_role to authenticator;
SQL
