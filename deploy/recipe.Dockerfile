# Your recipe, on top of an image of LightningRL. Build it in the recipe's folder, once for each image:
#
#   docker build -f …/deploy/recipe.Dockerfile --build-arg BASE=lightningrl-worker -t my-worker .
#   docker build -f …/deploy/recipe.Dockerfile --build-arg BASE=lightningrl-server -t my-server .
#
# recipe.Dockerfile.dockerignore says what stays out of them: keys, hidden files, environments, runs.
# The packages of the agent come from requirements.txt in that folder, or from `--build-arg PACKAGES="openai"`.
ARG BASE=lightningrl-worker
FROM ${BASE}
ARG PACKAGES=
COPY . /recipe
USER root
RUN set -- $PACKAGES; \
    if [ -f /recipe/requirements.txt ]; then set -- "$@" -r /recipe/requirements.txt; fi; \
    if [ $# -gt 0 ]; then pip install --no-cache-dir "$@"; fi
USER 1000
