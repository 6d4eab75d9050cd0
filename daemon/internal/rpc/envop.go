package rpc

import (
	"fmt"
	"strings"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

var envName = pattern.New(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

// Separator separates the elements of the variable's list: a comma in the lists of bind mounts
// of Apptainer and Singularity, a colon everywhere else.
func (o EnvOp) Separator() string {
	if strings.HasSuffix(o.Name, "_BINDPATH") {
		return ","
	}
	return ":"
}

// Check returns what is wrong with a change, nil if it fits in one line of text.
func (o EnvOp) Check() error {
	if !envName().MatchString(o.Name) {
		return fmt.Errorf("%.64q is not the name of a variable", o.Name)
	}
	if strings.ContainsAny(o.Value, "\n\x00") {
		return fmt.Errorf("%s: its value has more than one line", o.Name)
	}
	return nil
}

// Apply returns the variable's value after the change. old is the value before it. An element
// that is put first is removed from the rest of the list, so that repeating the change does
// nothing.
func (o EnvOp) Apply(old string) string {
	if !o.Prepend || old == "" {
		return o.Value
	}
	out := []string{o.Value}
	for _, item := range strings.Split(old, o.Separator()) {
		if item != o.Value {
			out = append(out, item)
		}
	}
	return strings.Join(out, o.Separator())
}

// EnvText writes the changes as the plug-in reads them, one on each line: "set NAME=VALUE",
// "prepend NAME=VALUE", or "bind NAME=VALUE" for a list with commas.
func EnvText(ops []EnvOp) (string, error) {
	var b strings.Builder
	for _, o := range ops {
		if err := o.Check(); err != nil {
			return "", err
		}
		verb := "set"
		if o.Prepend {
			verb = map[string]string{":": "prepend", ",": "bind"}[o.Separator()]
		}
		fmt.Fprintf(&b, "%s %s=%s\n", verb, o.Name, o.Value)
	}
	return b.String(), nil
}
