{{/* What the schema cannot say: values that contradict each other. Each message names them. */}}
{{- define "trimtab.checks" -}}
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
{{- if and (ne .certificate.mode "existingSecret") .certificate.caBundle -}}
{{- fail (printf "webhook.certificate.caBundle is given, but webhook.certificate.mode is %s, which puts it in by itself" .certificate.mode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
