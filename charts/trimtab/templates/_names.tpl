{{/* What objects are called, and the labels they carry. Names of the cluster's scope carry the namespace too, so that
     a release of the same name in another namespace does not meet this one. */}}

{{- define "trimtab.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
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
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "trimtab.labels" -}}
{{ include "trimtab.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: trimtab
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* name, component, root; cluster: without a namespace; annotations, labels: more of them. */}}
{{- define "trimtab.metadata" -}}
name: {{ .name }}
{{- if not .cluster }}
namespace: {{ default .root.Release.Namespace .namespace }}
{{- end }}
labels:
  {{- include "trimtab.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
