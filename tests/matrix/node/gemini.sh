#!/bin/sh
# Gemini CLI with a base URL of one's own refuses to run without a person, unless its settings say that a key is enough.
mkdir -p ~/.gemini && echo '{"security": {"auth": {"selectedType": "gemini-api-key"}}}' > ~/.gemini/settings.json
GEMINI_CLI_TRUST_WORKSPACE=true GEMINI_CLI_NO_RELAUNCH=true exec gemini "$@"
