#!/bin/sh
# Run a program of an agent in a container that ends with its attempt, however the attempt ends.
#
#   command = ["./in-container.sh", "IMAGE", "PROGRAM", "ARGUMENTS", …]        in [agent] of a recipe
#
# LightningRL ends an attempt with SIGKILL. That ends `docker run`, but not the container, which belongs to the daemon.
# So a shell in the container waits for the end of its stdin, which Docker closes when `docker run` is gone, and exits;
# then Docker kills all processes of the container. The image needs `sh` and `cat`.
#
# To be set in `agent.env` of the recipe:
# CONTAINER_RUNTIME: `docker` (default) or `podman`. CONTAINER_NETWORK: `host` (default), or a network (docs/deploy.md).
# CONTAINER_OPTIONS: more options of `docker run`, such as "--memory 2g --cpus 1 --volume /data:/data:ro".
set -eu
image=$1
shift

# Addresses and keys of the model, and switches against telemetry; as in docs/gateway.md. CODEX_HOME is a folder of the
# host and is not among them.
variables='
  LIGHTNINGRL_ATTEMPT NO_PROXY no_proxy
  OPENAI_BASE_URL OPENAI_API_BASE OPENAI_API_KEY
  ANTHROPIC_BASE_URL ANTHROPIC_API_BASE ANTHROPIC_API_KEY
  GOOGLE_GEMINI_BASE_URL GEMINI_API_BASE GEMINI_API_KEY GOOGLE_GENERATIVE_AI_API_KEY
  LLM_BASE_URL LLM_API_KEY LLM_MODEL AZURE_OPENAI_ENDPOINT AZURE_OPENAI_API_KEY
  OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_EXPORTER_OTLP_TRACES_PROTOCOL OTEL_EXPORTER_OTLP_TRACES_HEADERS
  DO_NOT_TRACK ANONYMIZED_TELEMETRY DISABLE_TELEMETRY NO_UPDATE_NOTIFIER LANGSMITH_TRACING LANGSMITH_TRACING_V2
  LANGCHAIN_TRACING_V2 OPENAI_AGENTS_DISABLE_TRACING LITELLM_LOCAL_MODEL_COST_MAP CREWAI_DISABLE_TELEMETRY
  CREWAI_DISABLE_TRACKING CREWAI_TRACING_ENABLED CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC DISABLE_AUTOUPDATER
  DISABLE_ERROR_REPORTING GEMINI_TELEMETRY_ENABLED OPENCODE_DISABLE_AUTOUPDATE AGNO_TELEMETRY
  HAYSTACK_TELEMETRY_ENABLED MASTRA_TELEMETRY_DISABLED MEM0_TELEMETRY HF_HUB_DISABLE_TELEMETRY
  GRADIO_ANALYTICS_ENABLED'
passed=
for name in $variables; do
  passed="$passed --env $name" # without a value: that of this process, or none
done

# The task is the first line of the container's stdin, which then stays open as long as `docker run` lives.
folder=$(mktemp -d)
mkfifo "$folder/stdin"
exec 3<>"$folder/stdin"
rm -r "$folder"
task=$(cat)
printf '%s\n' "$task" >&3 &

# shellcheck disable=SC2016 # for the shell in the container
inside='
  IFS= read -r task
  exec 3<&0
  printf %s "$task" | "$@" 3<&- &
  agent=$!
  { cat <&3 >/dev/null; kill -KILL $$; } &
  wait $agent'

# --network host: the model is served on 127.0.0.1 of this machine. --init: when the shell ends, everything ends.
# shellcheck disable=SC2086 # the options are words
exec "${CONTAINER_RUNTIME:-docker}" run --rm --interactive --init --network "${CONTAINER_NETWORK:-host}" \
  --label "lightningrl.attempt=${LIGHTNINGRL_ATTEMPT:-none}" \
  --cap-drop=ALL --security-opt=no-new-privileges --pids-limit=1024 \
  $passed ${CONTAINER_OPTIONS:-} "$image" sh -c "$inside" sh "$@" <&3
