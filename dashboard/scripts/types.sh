#!/bin/sh
# Writes src/api/schema.d.ts from the OpenAPI document of a coordinator.
#   npm run types -- http://127.0.0.1:3000/openapi.json     (or a file)
set -eu
cd "$(dirname "$0")/.."
# It needs an older TypeScript than the one that checks this project, so it is fetched on its own.
exec npx --yes -p openapi-typescript@7.13.0 -p typescript@5.9.3 \
  openapi-typescript "${1:-http://127.0.0.1:3000/openapi.json}" -o src/api/schema.d.ts --root-types --root-types-no-schema-prefix
