{{- define "sluicegate.name" -}}
{{- .Values.name | default .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- /* Labels that select the pods of one component: (list . "worker"). They never change. */ -}}
{{- define "sluicegate.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: sluicegate
{{- if not $root.Values.plain }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "sluicegate.release" -}}
{{- if not .Values.plain }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}
{{- end -}}

{{- /* Labels of one component's objects: (list . "worker"). */ -}}
{{- define "sluicegate.labels" -}}
{{ include "sluicegate.selector" . }}
{{- include "sluicegate.release" (index . 0) }}
{{- end -}}

{{- /* Labels of the objects that belong to no component. */ -}}
{{- define "sluicegate.common" -}}
app.kubernetes.io/name: sluicegate
{{- if not .Values.plain }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- include "sluicegate.release" . }}
{{- end -}}

{{- define "sluicegate.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{- define "sluicegate.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "sluicegate.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- /* The start of each pod's spec. */ -}}
{{- define "sluicegate.pod" -}}
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  # Makes the secrets below readable to that group only.
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- /* Rights and mounts of each container. */ -}}
{{- define "sluicegate.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
volumeMounts:
  - { name: configuration, mountPath: /etc/sluicegate, readOnly: true }
  - { name: secrets, mountPath: /run/secrets/sluicegate, readOnly: true }
{{- end -}}

{{- /* The environment of workers and operator. */ -}}
{{- define "sluicegate.env" -}}
- { name: SLUICEGATE_DATABASE__URL_FILE, value: /run/secrets/sluicegate/database_url }
- { name: SLUICEGATE_QUEUE__URL_FILE, value: /run/secrets/sluicegate/queue_url }
- { name: SLUICEGATE_LIMITER__URL_FILE, value: /run/secrets/sluicegate/limiter_url }
- { name: SLUICEGATE_OPS__TOKEN_FILE, value: /run/secrets/sluicegate/ops_token }
{{- end -}}

{{- /* One key of another Secret, mounted as a file of that name: (list REFERENCE FILE). */ -}}
{{- define "sluicegate.reference" -}}
{{- $reference := index . 0 -}}
{{- if $reference.name }}
- secret:
    name: {{ $reference.name }}
    items: [{ key: {{ $reference.key }}, path: {{ index . 1 }} }]
{{- end }}
{{- end -}}

{{- /* The volume of secrets of one role: (list . "workers"). Later sources replace files of earlier ones. */ -}}
{{- define "sluicegate.secrets" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $backends := $root.Values.backends -}}
{{- $database := dict "workers" $backends.database.worker "owner" $backends.database.owner "operator" $backends.database.operator -}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret: { name: {{ get $root.Values.secrets $role }} }
      {{- include "sluicegate.reference" (list (get $database $role) "database_url") | indent 6 }}
      {{- if ne $role "owner" }}
      {{- include "sluicegate.reference" (list $backends.queue "queue_url") | indent 6 }}
      {{- include "sluicegate.reference" (list $backends.limiter "limiter_url") | indent 6 }}
      {{- include "sluicegate.reference" (list $root.Values.opsToken "ops_token") | indent 6 }}
      {{- end }}
      {{- if eq $role "workers" }}
      {{- range $root.Values.secrets.more }}
      - secret:
          {{- toYaml . | nindent 10 }}
      {{- end }}
      {{- end }}
{{- end -}}

{{- /* The files of the ConfigMap. */ -}}
{{- define "sluicegate.configuration" -}}
sluicegate.toml: |
  [outbound]
  # Only public https, and the hosts named here.
  allow = {{ .Values.configuration.outbound.allow | toJson }}
  # Secrets that rows may send, and to which hosts: the providers' files of Secret `{{ .Values.secrets.workers }}`.
  secrets = {{ .Values.configuration.outbound.secrets | toJson }}

  [ops]
  # For the probes and Prometheus, which connect from outside the pod. All paths but the probes need the
  # token, of at least 32 characters.
  listen = "0.0.0.0:{{ .Values.ops.port }}"
  # The token names no person: it reads, and no command of a pod needs more.
  token_role = "{{ .Values.ops.tokenRole }}"
  {{- with .Values.ops.more }}
  {{- . | trim | nindent 2 }}
  {{- end }}

  [worker]
  # Above the longest timeout_ms + send_budget_ms of any provider: 30.5 s in config/providers. A stop takes at most this
  # and 9 s (14 s with traces); terminationGracePeriodSeconds of the workers is above that.
  drain_timeout_ms = {{ .Values.workers.drainTimeoutMs | int }}
  {{- if .Values.configuration.certificateAuthority }}

  [tls]
  ca_file = "/etc/sluicegate/ca.pem"
  {{- else if .Values.plain }}

  # Your own certificate authority for database, broker and limiter: put its certificate beside this file.
  # [tls]
  # ca_file = "/etc/sluicegate/ca.pem"
  {{- end }}

  [log]
  format = "json"
  {{- with .Values.configuration.more }}

  {{- . | trim | nindent 2 }}
  {{- end }}
{{- with .Values.configuration.certificateAuthority }}
ca.pem: |
  {{- . | trim | nindent 2 }}
{{- end }}
{{- end -}}
