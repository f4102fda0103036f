#!/usr/bin/env bash
# A Kubernetes cluster in Docker, with the images of this source. Needs docker, kind and kubectl.
#
#   manifests/kind.sh up        make the cluster, build the images, load them
#   manifests/kind.sh demo      install the quick start of docs/kubernetes.md
#   manifests/kind.sh test      run tests/cluster on it (words after it go to pytest); Linux only, because
#                               the tests' PostgreSQL listens on the address of Docker's bridge
#   manifests/kind.sh down      take the cluster away
#
# Its kubeconfig is .kind/kubeconfig: yours is not touched. `export KUBECONFIG=$PWD/.kind/kubeconfig`
# lets kubectl speak to it.

set -euo pipefail
cd "$(dirname "$0")/.."

CLUSTER=rowlock
VERSION=0.1.0
export KUBECONFIG=$PWD/.kind/kubeconfig

up() {
    mkdir -p .kind
    kind get clusters | grep -qx "$CLUSTER" || kind create cluster --config manifests/kind.yaml --wait 120s
    kind export kubeconfig --name "$CLUSTER"
    images
}

images() {
    docker build -t "rowlock-node:$VERSION" -f node/Dockerfile .
    docker build -t "rowlock-operator:$VERSION" -f operator/Dockerfile .
    docker build -t "rowlock-demo:$VERSION" -f manifests/demo/Dockerfile \
        --build-arg "ROWLOCK_NODE=rowlock-node:$VERSION" .
    kind load docker-image --name "$CLUSTER" \
        "rowlock-node:$VERSION" "rowlock-operator:$VERSION" "rowlock-demo:$VERSION"
}

demo() {
    kubectl apply --server-side -k manifests/demo
    kubectl -n rowlock rollout status deployment --timeout=180s
}

run_tests() {
    # Where pods reach this machine: the first IPv4 gateway of kind's network.
    local address
    address=$(docker network inspect kind \
        --format '{{range .IPAM.Config}}{{.Gateway}}{{"\n"}}{{end}}' | grep -m1 -F .)
    ROWLOCK_CLUSTER_DB_ADDRESS=$address \
    ROWLOCK_CLUSTER_NODE_IMAGE=rowlock-node:$VERSION \
    ROWLOCK_CLUSTER_OPERATOR_IMAGE=rowlock-operator:$VERSION \
    ROWLOCK_CLUSTER_DEMO_IMAGE=rowlock-demo:$VERSION \
        make cluster ARGS="$*"
}

down() {
    kind delete cluster --name "$CLUSTER"
    rm -rf .kind
}

verb=${1:-}
shift || true
case $verb in
    up | demo | down) "$verb" ;;
    test) run_tests "$@" ;;
    *)
        sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
