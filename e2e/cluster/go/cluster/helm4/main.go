// Helm 4, under a name of its own beside Helm 3.
package main

import (
	"errors"
	"log/slog"
	"os"

	helmcmd "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
)

func main() {
	kube.ManagedFieldsManager = "helm"
	command, err := helmcmd.NewRootCmd(os.Stdout, os.Args[1:], helmcmd.SetupLogging)
	if err != nil {
		slog.Warn("command failed", slog.Any("error", err))
		os.Exit(1)
	}
	if err := command.Execute(); err != nil {
		var failed helmcmd.CommandError
		if errors.As(err, &failed) {
			os.Exit(failed.ExitCode)
		}
		os.Exit(1)
	}
}
