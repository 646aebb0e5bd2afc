{{/* What the schema cannot say: values that contradict each other. Each message names them. */}}
{{- define "trimtab.checks" -}}
{{- if regexMatch "^[0-9]" (include "trimtab.fullname" .) -}}
{{- fail (printf "the release's name %s begins with a digit, which no Service's name may: call it otherwise, or set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- /* They would share the Lease, and each have a store of its own. */ -}}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items -}}
{{- $labels := default (dict) .metadata.labels -}}
{{- $isOperator := and (eq (get $labels "app.kubernetes.io/component") "operator") (hasPrefix "trimtab-" (get $labels "helm.sh/chart")) -}}
{{- $release := get $labels "app.kubernetes.io/instance" -}}
{{- if and $isOperator (ne $release $.Release.Name) -}}
{{- fail (printf "namespace %s has an installation already, by release %s: another one needs a namespace of its own" $.Release.Namespace $release) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "operator" "webhook" -}}
{{- $account := (get $.Values $name).serviceAccount -}}
{{- if and $.Values.rbac.create (not $account.create) (not $account.name) (or (eq $name "operator") $.Values.webhook.enabled) -}}
{{- fail (printf "%s.serviceAccount: with create=false, say its name; rights for `default` would be rights for every pod of the namespace" $name) -}}
{{- end -}}
{{- end -}}
{{- range $path, $image := dict "pools.envoyImage" .Values.pools.envoyImage "store.valkey.image" .Values.store.valkey.image -}}
{{- if not (or $image.tag $image.digest) -}}
{{- fail (printf "%s has neither tag nor digest" $path) -}}
{{- end -}}
{{- end -}}
{{- $own := append (include "trimtab.selector" (dict "root" . "component" "any") | fromYaml | keys) "app.kubernetes.io/managed-by" -}}
{{- $given := dict "commonLabels" .Values.commonLabels -}}
{{- range $name := list "operator" "webhook" -}}
{{- $_ := set $given (printf "%s.podLabels" $name) (get $.Values $name).podLabels -}}
{{- end -}}
{{- $_ := set $given "store.valkey.podLabels" .Values.store.valkey.podLabels -}}
{{- range $path, $labels := $given -}}
{{- range $key, $_ := $labels -}}
{{- if has $key $own -}}
{{- fail (printf "%s: %s is the chart's own, by which objects are found" $path $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.store.external -}}
{{- if eq $.Values.store.mode "external" -}}
{{- $ways := list -}}
{{- if .existingSecret }}{{ $ways = append $ways "store.external.existingSecret" }}{{ end -}}
{{- if .url }}{{ $ways = append $ways "store.external.url" }}{{ end -}}
{{- if .hosts }}{{ $ways = append $ways "store.external.hosts" }}{{ end -}}
{{- if not $ways -}}
{{- fail "store.mode is external: say where the store is, by store.external.existingSecret, store.external.url or store.external.hosts" -}}
{{- end -}}
{{- if gt (len $ways) 1 -}}
{{- fail (printf "only one of these may be given: %s" (join ", " $ways)) -}}
{{- end -}}
{{- if and .hosts (eq .topology "standalone") (gt (len .hosts) 1) -}}
{{- fail "store.external.hosts has several hosts: for that store.external.topology must be sentinel or cluster" -}}
{{- end -}}
{{- if and .hosts (eq .topology "sentinel") (not .sentinel.service) -}}
{{- fail "store.external.topology is sentinel: store.external.sentinel.service is missing, what the sentinels call the master" -}}
{{- end -}}
{{- if and (eq .topology "cluster") .database -}}
{{- fail "store.external.database: a cluster has only database 0" -}}
{{- end -}}
{{- if and .auth.password .auth.existingSecret -}}
{{- fail "only one of these may be given: store.external.auth.password, store.external.auth.existingSecret" -}}
{{- end -}}
{{- if and (not .hosts) (or .auth.username .auth.password .auth.existingSecret) -}}
{{- fail (printf "store.external.auth counts only with store.external.hosts: with %s the URL has the login" (first $ways)) -}}
{{- end -}}
{{- if and .tls.enabled .url (not (regexMatch "^(rediss|valkeys)[:+]" .url)) -}}
{{- fail "store.external.tls.enabled, but store.external.url is one without TLS: it begins with rediss where there is" -}}
{{- end -}}
{{- if and .tls.caSecret (not .tls.enabled) -}}
{{- fail "store.external.tls.caSecret without store.external.tls.enabled" -}}
{{- end -}}
{{- else if or .existingSecret .url .hosts -}}
{{- fail "store.external says where a store is, but store.mode is valkey: set store.mode=external" -}}
{{- end -}}
{{- end -}}
{{- with .Values.store.valkey.auth -}}
{{- if and .password .existingSecret -}}
{{- fail "only one of these may be given: store.valkey.auth.password, store.valkey.auth.existingSecret" -}}
{{- end -}}
{{- end -}}
{{- with .Values.webhook -}}
{{- if .enabled -}}
{{- if and (eq .certificate.mode "existingSecret") (or (not .certificate.existingSecret) (not .certificate.caBundle)) -}}
{{- fail "webhook.certificate.mode is existingSecret: webhook.certificate.existingSecret (a kubernetes.io/tls Secret) and webhook.certificate.caBundle (PEM, who signed it) are needed" -}}
{{- end -}}
{{- if eq (int .ports.https) (int .ports.metrics) -}}
{{- fail (printf "webhook.ports.https and webhook.ports.metrics are both %v" .ports.https) -}}
{{- end -}}
{{- if and (ne .certificate.mode "existingSecret") .certificate.caBundle -}}
{{- fail (printf "webhook.certificate.caBundle is given, but webhook.certificate.mode is %s, which puts it in by itself" .certificate.mode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
