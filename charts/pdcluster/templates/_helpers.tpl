{{- define "pdcluster.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "pdcluster.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pdcluster.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pdcluster.name" . }}-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "pdcluster.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "pdcluster.name" . }}-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pdcluster
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "pdcluster.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "pdcluster.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "pdcluster.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- /* The namespace of the operator's Lease: its own one decides who acts there. */}}
{{- define "pdcluster.leaseNamespace" -}}
{{- default .Release.Namespace .Values.watchNamespace }}
{{- end }}

{{- /* What the operator is told about rendering: operator/pd_operator/rendering.py. The
operator itself is let in to the routers' admin ports, to read how they fare. */}}
{{- define "pdcluster.rendering" -}}
{{- $operator := dict
      "namespaceLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace)
      "podLabels" (include "pdcluster.selectorLabels" . | fromYaml) }}
{{- dict
      "networkPolicies" (dict
        "enabled" .Values.networkPolicies.enabled
        "operators" (list $operator)
        "clients" .Values.networkPolicies.clients
        "monitors" .Values.networkPolicies.monitors)
      "monitors" .Values.monitors
      "certificates" .Values.certificates
      "peerTokens" .Values.peerTokens
      "rdmaResource" .Values.rdmaResource | toJson }}
{{- end }}

{{- /* Rules of files/rbac.yaml: (list . "namespaced"). */}}
{{- define "pdcluster.rules" -}}
{{- $root := index . 0 }}
{{- $rules := $root.Files.Get "files/rbac.yaml" | fromYaml }}
{{- range index $rules (index . 1) }}
- {{ toYaml . | nindent 2 | trim }}
{{- end }}
{{- end }}
