{{/* The rules of a role of manifests/operator-rbac.yaml, which is the one place where they stand, with this release's
     names in them. The operator writes the webhook's configuration only where it keeps the certificate, and never makes
     it: that is what this chart does. */}}
{{- define "trimtab.rules" -}}
{{- $root := .root -}}
{{- $rules := list -}}
{{- $names := dict
  "trimtab-injection-trimtab-system" (include "trimtab.webhookConfiguration" $root)
  "trimtab-webhook-certificate" (include "trimtab.webhookCertificateSecret" $root)
  "trimtab-install" $root.Values.installSecret -}}
{{- range splitList "\n---\n" ($root.Files.Get "files/operator-rbac.yaml") -}}
{{- $document := fromYaml . -}}
{{- if and (eq (toString $document.kind) $.kind) (eq (dig "metadata" "name" "" $document) $.name) -}}
{{- range $document.rules -}}
{{- $isWebhook := has "mutatingwebhookconfigurations" .resources -}}
{{- $isWanted := and (not (has "create" .verbs)) $root.Values.webhook.enabled (eq $root.Values.webhook.certificate.mode "self") -}}
{{- if or (not $isWebhook) $isWanted -}}
{{- $rule := . -}}
{{- if .resourceNames -}}
{{- $ours := list -}}
{{- range .resourceNames }}{{ $ours = append $ours (get $names . | default .) }}{{ end -}}
{{- $rule = merge (dict "resourceNames" $ours) . -}}
{{- end -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $rules -}}
{{- fail (printf "files/operator-rbac.yaml has no %s %s: the chart was packed without what it links to" .kind .name) -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}

{{- define "trimtab.subjects" -}}
subjects:
  - kind: ServiceAccount
    name: {{ .account | quote }}
    namespace: {{ .root.Release.Namespace | quote }}
{{- end -}}

{{/* In all namespaces: ClusterRole and binding. In some: a Role and a binding in each. */}}
{{- define "trimtab.poolRights" -}}
{{- $root := .root -}}
{{- $given := . -}}
{{- $name := printf "%s-pools" .fullname -}}
{{- if $root.Values.watchNamespaces }}
{{- range $root.Values.watchNamespaces }}
{{- $name := printf "%s-%s" $name $root.Release.Namespace }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  {{- include "trimtab.metadata" (dict "root" $root "component" $given.component "name" $name "namespace" .) | nindent 2 }}
rules:
  {{- include "trimtab.rules" (dict "root" $root "kind" "ClusterRole" "name" $given.source) | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  {{- include "trimtab.metadata" (dict "root" $root "component" $given.component "name" $name "namespace" .) | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $name }}
{{ include "trimtab.subjects" $given }}
{{- end }}
{{- else }}
{{- include "trimtab.clusterRights" (merge (dict "role" "pools") $given) }}
{{- end }}
{{- end -}}

{{- define "trimtab.clusterRights" -}}
{{- $name := printf "%s-%s-%s" .fullname .role .root.Release.Namespace }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  {{- include "trimtab.metadata" (dict "root" .root "component" .component "name" $name "cluster" true) | nindent 2 }}
rules:
  {{- include "trimtab.rules" (dict "root" .root "kind" "ClusterRole" "name" .source) | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  {{- include "trimtab.metadata" (dict "root" .root "component" .component "name" $name "cluster" true) | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ $name }}
{{ include "trimtab.subjects" . }}
{{- end -}}

{{/* In the release's own namespace. */}}
{{- define "trimtab.ownRights" }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  {{- include "trimtab.metadata" (dict "root" .root "component" .component "name" .fullname) | nindent 2 }}
rules:
  {{- include "trimtab.rules" (dict "root" .root "kind" "Role" "name" .source) | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  {{- include "trimtab.metadata" (dict "root" .root "component" .component "name" .fullname) | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ .fullname }}
{{ include "trimtab.subjects" . }}
{{- end -}}
