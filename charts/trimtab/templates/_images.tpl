{{/* Images by registry, repository, tag and digest; a digest beats the tag. */}}

{{- define "trimtab.imageName" -}}
{{- $image := .image -}}
{{- $registry := default "" (default $image.registry .root.Values.global.imageRegistry) -}}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "trimtab.image" -}}{{ include "trimtab.imageName" (dict "root" . "image" .Values.image) }}{{- end -}}

{{- define "trimtab.pullSecretNames" -}}
{{- concat (default (list) .Values.global.imagePullSecrets) (default (list) .Values.imagePullSecrets) | uniq | toJson -}}
{{- end -}}

{{- define "trimtab.pullSecrets" -}}
{{- with include "trimtab.pullSecretNames" . | fromJsonArray }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}
