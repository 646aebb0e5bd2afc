{{/* How operator and test reach the store: one variable with its URL, and files for what is secret and can be one. */}}

{{- define "trimtab.storeFolder" -}}/var/run/secrets/trimtab-store{{- end -}}
{{- define "trimtab.storeCaFolder" -}}/var/run/secrets/trimtab-store-ca{{- end -}}

{{/* Secret and key of the password; empty: there is none. */}}
{{- define "trimtab.storePassword" -}}
{{- $own := dict "name" (printf "%s-store" (include "trimtab.fullname" .)) "key" "password" -}}
{{- if eq .Values.store.mode "valkey" -}}
{{- with .Values.store.valkey.auth -}}
{{- if .existingSecret -}}{{ dict "name" .existingSecret "key" .existingSecretKey | toJson }}{{- else -}}{{ toJson $own }}{{- end -}}
{{- end -}}
{{- else if not (include "trimtab.storeUrlSecret" .) -}}
{{- with .Values.store.external.auth -}}
{{- if .existingSecret -}}{{ dict "name" .existingSecret "key" .existingSecretKey | toJson }}{{- else if .password -}}{{ toJson $own }}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Secret and key of the whole URL; empty: it is put together from its parts. */}}
{{- define "trimtab.storeUrlSecret" -}}
{{- if eq .Values.store.mode "external" -}}
{{- with .Values.store.external -}}
{{- if .existingSecret -}}{{ dict "name" .existingSecret "key" .existingSecretKey | toJson }}
{{- else if .url -}}{{ dict "name" (printf "%s-store" (include "trimtab.fullname" $)) "key" "url" | toJson }}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trimtab.escaped" -}}{{ . | urlquery | replace "+" "%20" }}{{- end -}}

{{/* Put together; without secrets in it. */}}
{{- define "trimtab.storeUrl" -}}
{{- $query := list -}}
{{- if include "trimtab.storePassword" . -}}
{{- $query = append $query (printf "password_file=%s/password" (include "trimtab.storeFolder" .)) -}}
{{- end -}}
{{- if eq .Values.store.mode "valkey" -}}
redis://{{ include "trimtab.valkey" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:6379
{{- else -}}
{{- $store := .Values.store.external -}}
{{- if $store.tls.enabled -}}
{{- if $store.tls.caSecret -}}
{{- $query = append $query (printf "ssl_ca_certs=%s/ca.crt" (include "trimtab.storeCaFolder" .)) -}}
{{- end -}}
{{- if not $store.tls.verify -}}
{{- $query = append $query "ssl_cert_reqs=none" -}}
{{- else if not $store.tls.checkHostname -}}
{{- $query = append $query "ssl_check_hostname=false" -}}
{{- end -}}
{{- end -}}
{{- if $store.sentinel.username -}}
{{- $query = append $query (printf "sentinel_username=%s" (include "trimtab.escaped" $store.sentinel.username)) -}}
{{- end -}}
{{- if $store.sentinel.existingSecret -}}
{{- $query = append $query "sentinel_password=$(TRIMTAB_SENTINEL_PASSWORD)" -}}
{{- end -}}
{{ ternary "rediss" "redis" $store.tls.enabled }}{{ get (dict "standalone" "" "sentinel" "+sentinel" "cluster" "+cluster") $store.topology }}://
{{- with $store.auth.username }}{{ include "trimtab.escaped" . }}@{{ end }}{{ join "," $store.hosts }}
{{- if eq $store.topology "sentinel" }}/{{ include "trimtab.escaped" $store.sentinel.service }}{{ end }}
{{- if $store.database }}/{{ int $store.database }}{{ end }}
{{- end -}}
{{- if $query }}?{{ join "&" $query }}{{ end -}}
{{- end -}}

{{- define "trimtab.storeEnv" -}}
{{- if include "trimtab.storeUrlSecret" . }}
{{- $secret := include "trimtab.storeUrlSecret" . | fromJson }}
- name: TRIMTAB_STORE
  valueFrom:
    secretKeyRef:
      name: {{ $secret.name | quote }}
      key: {{ $secret.key | quote }}
{{- else }}
{{- if and (eq .Values.store.mode "external") .Values.store.external.sentinel.existingSecret }}
- name: TRIMTAB_SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.store.external.sentinel.existingSecret | quote }}
      key: {{ .Values.store.external.sentinel.existingSecretKey | quote }}
{{- end }}
- name: TRIMTAB_STORE
  value: {{ include "trimtab.storeUrl" . | quote }}
{{- end }}
{{- end -}}

{{- define "trimtab.storeMounts" -}}
{{- if include "trimtab.storePassword" . }}
- name: store
  mountPath: {{ include "trimtab.storeFolder" . }}
  readOnly: true
{{- end }}
{{- if include "trimtab.storeCa" . }}
- name: store-ca
  mountPath: {{ include "trimtab.storeCaFolder" . }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "trimtab.storeVolumes" -}}
{{- if include "trimtab.storePassword" . }}
{{- $secret := include "trimtab.storePassword" . | fromJson }}
- name: store
  secret:
    secretName: {{ $secret.name | quote }}
    defaultMode: 0440
    items:
      - key: {{ $secret.key | quote }}
        path: password
{{- end }}
{{- if include "trimtab.storeCa" . }}
- name: store-ca
  secret:
    secretName: {{ .Values.store.external.tls.caSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ .Values.store.external.tls.caSecretKey | quote }}
        path: ca.crt
{{- end }}
{{- end -}}

{{- define "trimtab.storeCa" -}}
{{- if and (eq .Values.store.mode "external") .Values.store.external.tls.caSecret -}}yes{{- end -}}
{{- end -}}

{{/* Changes with what the operator reads of the store at its start, and with what Valkey does. It stands in the open, so
     what is secret in it goes through a function that takes its time (scrypt): nobody tries a list of passwords on it. */}}
{{- define "trimtab.storeChecksum" -}}
{{- $external := .Values.store.external -}}
{{- $open := dict "mode" .Values.store.mode "url" (include "trimtab.storeUrl" .) "secret" (include "trimtab.storeUrlSecret" .) -}}
{{- include "trimtab.checksum" (dict "root" . "open" $open "secret" (default "" $external.url)) -}}
{{- end -}}

{{/* Valkey reads its password at its start alone: where that was made anew, it has to start again. */}}
{{- define "trimtab.valkeyChecksum" -}}
{{- $auth := .Values.store.valkey.auth -}}
{{- $open := dict "conf" (include "trimtab.valkeyConf" .) "auth" (pick $auth "existingSecret" "existingSecretKey") -}}
{{- $secret := "" -}}
{{- if not $auth.existingSecret }}{{ $secret = (include "trimtab.ownPassword" . | fromJson).password }}{{ end -}}
{{- include "trimtab.checksum" (dict "root" . "open" $open "secret" $secret) -}}
{{- end -}}

{{/* Of the Secret that the chart makes: as given, as it is there, or at random, and then once in a rendering. */}}
{{- define "trimtab.ownPassword" -}}
{{- $auth := .Values.store.valkey.auth -}}
{{- $own := get $auth "own" -}}
{{- if not $own -}}
{{- $live := lookup "v1" "Secret" .Release.Namespace (printf "%s-store" (include "trimtab.fullname" .)) -}}
{{- $kept := dig "data" "password" "" $live | b64dec -}}
{{- $own = dict "isRandom" (not (or $auth.password $kept)) "password" (coalesce $auth.password $kept (randAlphaNum 40)) -}}
{{- $_ := set $auth "own" $own -}}
{{- end -}}
{{- toJson $own -}}
{{- end -}}

{{- define "trimtab.checksum" -}}
{{- $secret := "" -}}
{{- if trim .secret -}}
{{- $secret = derivePassword 1 "long" .secret "checksum" (printf "%s/%s" .root.Release.Namespace .root.Release.Name) -}}
{{- end -}}
{{- printf "%s %s" (toJson .open) $secret | sha256sum -}}
{{- end -}}

{{/* MiB of data that the store may hold: docs/install.md has the sum and where its figures are from. */}}
{{- define "trimtab.valkeyMiB" -}}
{{- with .Values.store.valkey -}}
{{- if .maxMemoryMiB -}}
{{- int .maxMemoryMiB -}}
{{- else -}}
{{- $chunks := mulf .sizing.pods .sizing.blocksPerPod .sizing.tokensPerBlock 0.0625 -}}
{{- $snapshots := divf (mulf $chunks 24) 1048576 -}}
{{- addf 64 (mulf .sizing.pools 320) $snapshots | ceil | int -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trimtab.valkeyConf" -}}
# What is in it has a time to live, and every part writes its own again into an empty store: nothing is saved.
port 6379
bind * -::*
dir /data
save ""
appendonly no
tcp-keepalive 60
maxmemory {{ include "trimtab.valkeyMiB" . }}mb
# Full is better than wrong: a write that is refused is noticed and repeated, a key that is thrown out is not.
maxmemory-policy noeviction
{{- with .Values.store.valkey.extraConfig }}
{{ . }}
{{- end }}
{{- end -}}
