// Package cdi writes specifications of the Container Device Interface, by which an
// engine without a hooks directory brings a lease into a container: podman, docker 25 and
// newer, containerd and others take --device sluice.dev/gpu=NAME.
package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/oci-hook/internal/request"
)

const (
	// Kind is that of our devices.
	Kind = "sluice.dev/gpu"
	// Version is the lowest that has what is used here: old engines ignore newer ones without a word, new ones
	// refuse what says less than it uses. DigitVersion is the first where a device's name may begin with a digit.
	Version      = "0.3.0"
	DigitVersion = "0.5.0"
)

// ErrName is wrapped where a device's name or a lease's id has not the form of one.
var ErrName = errors.New("invalid name")

// Device is what a specification describes: one lease.
type Device struct {
	Name  string // as users write it: job42
	Lease string // as form.ParseLeaseID takes it
}

// Place says where things are on the host and in a container.
type Place struct {
	Lib, Leases, Target, Socket string
	Hook                        specs.Hook
}

// hookTimeout is after how many seconds a runtime ends the hook, which ends itself before.
const hookTimeout = 15

// Hook is our entry in a container's specification, for the program at path. Its environment is never
// empty: with none some runtimes give it the image's, LD_PRELOAD and all. By its first argument it is
// not taken for the wrapper, whatever the program's name is.
func Hook(path string, args ...string) specs.Hook {
	timeout := hookTimeout
	return specs.Hook{Path: path, Args: append([]string{"sluice-hook", "createContainer"}, args...), Env: []string{"SLUICE_HOOK=1"}, Timeout: &timeout}
}

type file struct {
	CDIVersion string   `json:"cdiVersion"`
	Kind       string   `json:"kind"`
	Devices    []device `json:"devices"`
}

type device struct {
	Name  string `json:"name"`
	Edits edits  `json:"containerEdits"`
}

type edits struct {
	Env    []string `json:"env"`
	Mounts []mount  `json:"mounts"`
	Hooks  []hook   `json:"hooks"`
}

type mount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Options       []string `json:"options"`
}

type hook struct {
	Name    string   `json:"hookName"`
	Path    string   `json:"path"`
	Args    []string `json:"args"`
	Env     []string `json:"env"`
	Timeout *int     `json:"timeout,omitempty"`
}

// Spec makes a specification of one device. The mounts are in it for engines that run no
// hooks; where one does, it makes the loader find what is mounted.
func Spec(d Device, p Place) ([]byte, error) {
	if !form.IsPlainName(d.Name) {
		return nil, fmt.Errorf("%w: device %q; letters, digits, _ . - make a name", ErrName, d.Name)
	}
	if _, err := form.ParseLeaseID(d.Lease); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrName, err)
	}
	options := []string{"bind", "ro", "nosuid", "nodev"}
	h := hook{Name: "createContainer", Path: p.Hook.Path, Args: append(append([]string{}, p.Hook.Args...), "--lease", d.Lease), Env: p.Hook.Env, Timeout: p.Hook.Timeout}
	version := Version
	if d.Name[0] >= '0' && d.Name[0] <= '9' {
		version = DigitVersion
	}
	f := file{CDIVersion: version, Kind: Kind, Devices: []device{{Name: d.Name, Edits: edits{
		Env: []string{request.Variable + "=" + p.Socket},
		Mounts: []mount{
			{HostPath: p.Lib, ContainerPath: p.Target, Options: options},
			{HostPath: filepath.Join(p.Leases, d.Lease), ContainerPath: p.Target + "/lease", Options: options},
		},
		Hooks: []hook{h},
	}}}}
	b, err := json.MarshalIndent(f, "", "  ")
	return append(b, '\n'), err
}

// prefix begins the names of our files.
const prefix = "sluice-"

// Write writes a specification into a directory of them. Engines may read it at any time.
// The file is named after the device: the new one of a job replaces the old one. Unfinished
// files that earlier writers left in the directory are removed.
func Write(dir string, d Device, p Place) (path string, err error) {
	b, err := Spec(d, p)
	if err != nil {
		return "", err
	}
	path = filepath.Join(dir, prefix+d.Name+".json")
	err = safefile.SweepAbandoned(dir, prefix)
	if err == nil {
		err = safefile.Write(path, b, safefile.How{Mode: 0o644})
	}
	if err != nil {
		return "", fmt.Errorf("CDI specification: %w", err)
	}
	return path, nil
}
