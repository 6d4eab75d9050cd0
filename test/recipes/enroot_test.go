package recipes

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// enroot runs the hook for enroot with a socket's path as enroot does, and gives what it has mounted and made of the
// container's environment.
func enroot(t *testing.T, socket string) (mounts, environ string, err error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"enroot-mount": "#!/bin/sh\ncat >>" + dir + "/mounts\n",
		"environ":      "HOME=/root\nSLUICE_LEASE_ID=another\n",
		"mounts":       "",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("bash", etc+"/containers/enroot/50-sluice.sh")
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "ENROOT_ROOTFS="+dir, "ENROOT_ENVIRON="+dir+"/environ", "SLUICE_SOCKET="+socket)
	_, err = cmd.Output()
	return read(t, dir+"/mounts"), read(t, dir+"/environ"), err
}

// The hook takes a lease's socket for what its path says. What stands in the mounts' lines and in the environment has no blank, no line
// break and no way out of the folder of leases.
func TestEnrootHook(t *testing.T) {
	leases := filepath.Join(t.TempDir(), "leases")
	id := "00112233445566778899aabbccddeeff"
	for _, name := range []string{id, "a b", "a\nb", "x"} {
		if err := os.MkdirAll(filepath.Join(leases, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if name == "x" {
			continue // without a socket
		}
		l, err := net.Listen("unix", filepath.Join(leases, name, "sock"))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	mounts, environ, err := enroot(t, leases+"/"+id+"/sock")
	if err != nil || !strings.Contains(mounts, "\n"+leases+" "+leases+" none ") {
		t.Errorf("%v, mounts %q", err, mounts)
	}
	for _, want := range []string{"SLUICE_LEASE_ID=" + id, "SLUICE_SOCKET=" + leases + "/" + id + "/sock", "HOME=/root", "LD_LIBRARY_PATH=/run/sluice/lib"} {
		if !strings.Contains("\n"+environ, "\n"+want+"\n") {
			t.Errorf("%q is not in the environment: %q", want, environ)
		}
	}
	if strings.Contains(environ, "another") {
		t.Errorf("another lease's id is left: %q", environ)
	}
	for _, path := range []string{
		leases + "/x/sock", leases + "/a b/sock", leases + "/a\nb/sock", leases + "/x/../sock", leases + "/" + id + "/../sock", leases + "/" + id, "sock", leases + "/" + id + "/sock/",
	} {
		if mounts, environ, err := enroot(t, path); err == nil || mounts != "" || strings.Contains(environ, path) {
			t.Errorf("%q is taken: mounts %q, environment %q", path, mounts, environ)
		}
	}
}
