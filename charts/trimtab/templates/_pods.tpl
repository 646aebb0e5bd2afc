{{/* What the chart's own pods have in common. */}}

{{- define "trimtab.scheduling" -}}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* As given; else over zones and nodes, as far as it goes. */}}
{{- define "trimtab.spread" -}}
{{- if .of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .of.topologySpreadConstraints | nindent 2 }}
{{- else if gt (int .of.replicas) 1 }}
topologySpreadConstraints:
  {{- $root := .root }}{{ $component := .component }}
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "trimtab.selector" (dict "root" $root "component" $component) | nindent 8 }}
    # The old pods of a rolling update are going; they must not push the new ones together.
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- end }}
{{- end -}}

{{/* Nothing that changes with the chart's version alone: that would be no reason to make a pod again. */}}
{{- define "trimtab.podMetadata" -}}
labels:
  {{- $selector := include "trimtab.selector" (dict "root" .root "component" .component) | fromYaml }}
  {{- $own := dict "app.kubernetes.io/part-of" "trimtab" }}
  {{- include "trimtab.oneOfEach" (list $selector .of.podLabels .root.Values.commonLabels $own) | nindent 2 }}
{{- $scrape := dict }}
{{- with .metricsPort }}
{{- $scrape = dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString .) "prometheus.io/path" "/metrics" }}
{{- end }}
{{- with merge (dict) (default (dict) .annotations) (default (dict) .of.podAnnotations) $scrape }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "trimtab.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "trimtab.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .of.podDisruptionBudget.maxUnavailable }}
  # A pod that does not work yet protects nothing, and must not hold up a drain.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "trimtab.selector" . | nindent 6 }}
{{- end -}}
