// One program that is all of Kubernetes: its own name, or its first argument, says which part.
// Six separate binaries would be linked six times and take five times the disk.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func run(command func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(command())) }
}

var parts = map[string]func(){
	"kube-apiserver":          run(apiserver.NewAPIServerCommand),
	"kube-controller-manager": run(manager.NewControllerManagerCommand),
	"kube-proxy":              run(proxy.NewProxyCommand),
	"kube-scheduler":          run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 run(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kubectl":                 runKubectl,
}

// kubectl prints its own errors, and takes its exit status from them.
func runKubectl() {
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}

func main() {
	run, found := parts[filepath.Base(os.Args[0])]
	if !found && len(os.Args) > 1 {
		run, found = parts[os.Args[1]]
		os.Args = os.Args[1:]
	}
	if !found {
		names := make([]string, 0, len(parts))
		for name := range parts {
			names = append(names, name)
		}
		sort.Strings(names)
		fmt.Fprintf(os.Stderr, "usage: kube PART [ARGUMENTS], PART one of: %s\n", strings.Join(names, " "))
		os.Exit(2)
	}
	run()
}
