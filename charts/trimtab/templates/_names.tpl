{{/* What objects are called, and the labels they carry. Names of the cluster's scope carry the namespace too, so that
     a release of the same name in another namespace does not meet this one. */}}

{{- define "trimtab.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- if contains $name $release -}}
{{- $release | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" $release $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "trimtab.operator" -}}{{ include "trimtab.fullname" . }}-operator{{- end -}}
{{- define "trimtab.webhook" -}}{{ include "trimtab.fullname" . }}-webhook{{- end -}}
{{- define "trimtab.valkey" -}}{{ include "trimtab.fullname" . }}-valkey{{- end -}}

{{- define "trimtab.operatorAccount" -}}
{{- if .Values.operator.serviceAccount.create -}}
{{- default (include "trimtab.operator" .) .Values.operator.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.operator.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "trimtab.webhookAccount" -}}
{{- if .Values.webhook.serviceAccount.create -}}
{{- default (include "trimtab.webhook" .) .Values.webhook.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.webhook.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The operator knows this object by this name, and no other: one installation in a namespace. */}}
{{- define "trimtab.webhookConfiguration" -}}trimtab-injection-{{ .Release.Namespace }}{{- end -}}

{{- define "trimtab.webhookCertificateSecret" -}}
{{- default "trimtab-webhook-certificate" .Values.webhook.certificate.existingSecret -}}
{{- end -}}

{{/* Never change: selectors cannot. */}}
{{- define "trimtab.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "trimtab.labels" -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- $own := dict
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "app.kubernetes.io/part-of" "trimtab"
  "helm.sh/chart" $chart -}}
{{- include "trimtab.oneOfEach" (list (include "trimtab.selector" . | fromYaml) .labels .root.Values.commonLabels $own) -}}
{{- end -}}

{{/* Maps put together: where several have a key, the first one's value counts. A key that stands twice is no YAML. */}}
{{- define "trimtab.oneOfEach" -}}
{{- $all := dict -}}
{{- range . }}{{ $all = merge $all (default (dict) .) }}{{ end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* name, component, root; cluster: without a namespace; annotations, labels: more of them. */}}
{{- define "trimtab.metadata" -}}
name: {{ .name | quote }}
{{- if not .cluster }}
namespace: {{ default .root.Release.Namespace .namespace | quote }}
{{- end }}
labels:
  {{- include "trimtab.labels" . | nindent 2 }}
{{- with merge (dict) (default (dict) .annotations) (default (dict) .root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
