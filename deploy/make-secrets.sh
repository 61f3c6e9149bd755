#!/usr/bin/env bash
# Makes everything that the manifests expect an operator to provide, for a trial: a certificate
# authority, certificates and tokens. Prints the Secrets; needs openssl, and talks to no cluster.
#
#   deploy/make-secrets.sh [NAMESPACE] [DAYS] > secrets.yaml
#   kubectl apply -f secrets.yaml
#
# Called again, it makes everything anew: apply all of it, and services take it up without a
# restart. The authority's key is thrown away, so that nobody can sign with it later.
set -euo pipefail

namespace=${1:-ssd}
days=${2:-90}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 077
cd "$work"

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

make_authority() {
    new_key ca.key
    openssl req -x509 -new -key ca.key -sha256 -days "$days" -subj "/CN=ssd-ca" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.crt
}

# make_certificate NAME USAGES DNS-NAME…
make_certificate() {
    local name=$1 usages=$2 alternatives
    shift 2
    alternatives=$(printf ',DNS:%s' "$@")
    new_key "$name.key"
    openssl req -new -key "$name.key" -subj "/CN=$name" -out "$name.csr"
    openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -sha256 -days "$days" \
        -set_serial "0x$(openssl rand -hex 16)" -out "$name.crt" -extfile <(
        printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n'
        printf 'extendedKeyUsage=%s\nsubjectAltName=%s\n' "$usages" "${alternatives#,}"
    ) 2>/dev/null
}

# Names under which a Service is known, from the same namespace and from others.
names_of() {
    printf '%s\n' "$1" "$1.$namespace" "$1.$namespace.svc" "$1.$namespace.svc.cluster.local"
}

# token_entry NAME ROLE TOKEN: what a server keeps of a token is its digest.
token_entry() {
    printf '[[token]]\nname = "%s"\nroles = ["%s"]\nsha256 = "%s"\n' "$1" "$2" \
        "$(printf '%s' "$3" | openssl dgst -sha256 -r | cut -d' ' -f1)"
}

# print_secret NAME TYPE KEY=FILE…
print_secret() {
    printf -- '---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\n  namespace: %s\n' "$1" "$namespace"
    printf 'type: %s\nstringData:\n' "$2"
    shift 2
    for each in "$@"; do
        printf '  %s: |\n' "${each%%=*}"
        sed 's/^/    /' "${each#*=}"
    done
}

print_tls() { print_secret "$1-tls" kubernetes.io/tls "tls.crt=$1.crt" "tls.key=$1.key" ca.crt=ca.crt; }

make_authority
mapfile -t target_names < <(names_of ssd-target && names_of ssd-target-headless)
mapfile -t draft_names < <(names_of ssd-draft-headless)
mapfile -t gateway_names < <(names_of ssd-gateway)
make_certificate ssd-target serverAuth,clientAuth localhost "${target_names[@]}" \
    "*.ssd-target-headless.$namespace.svc.cluster.local"
make_certificate ssd-draft serverAuth localhost "${draft_names[@]}"
make_certificate ssd-gateway serverAuth localhost "${gateway_names[@]}"
make_certificate ssd-client clientAuth ssd-client

for each in client-token gateway-token draft-token cluster-secret; do openssl rand -hex 32 >"$each"; done
token_entry trial-client generate "$(cat client-token)" >target-tokens
token_entry ssd-gateway generate "$(cat gateway-token)" >>target-tokens
token_entry ssd-target speculate "$(cat draft-token)" >draft-tokens

print_tls ssd-target
print_tls ssd-draft
print_tls ssd-gateway
print_tls ssd-client
print_secret ssd-target-tokens Opaque tokens.toml=target-tokens
print_secret ssd-draft-tokens Opaque tokens.toml=draft-tokens
print_secret ssd-client-access Opaque token=client-token
print_secret ssd-gateway-access Opaque token=gateway-token
print_secret ssd-draft-access Opaque token=draft-token
print_secret ssd-cluster Opaque secret=cluster-secret
