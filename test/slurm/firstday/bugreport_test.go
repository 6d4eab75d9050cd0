package firstday

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestBugreport: the archive has what a maintainer needs and none of the secrets that are planted in everything it reads; it is
// for its owner alone, overwrites nothing, and is not written at all if a key is in it in spite of all.
func TestBugreport(t *testing.T) {
	t.Parallel()
	r := newRig(t).begin(t)
	n := r.own
	secrets := map[string]string{}
	secret := func(what string) string {
		b := make([]byte, 15)
		_, _ = rand.Read(b)
		s := "aZ9" + base64.RawURLEncoding.EncodeToString(b)
		secrets[what] = s
		return s
	}
	key := make([]byte, 128)
	_, _ = rand.Read(key)
	secrets["munge.key"], secrets["munge.key in hex"], secrets["munge.key in base64"] = string(key), hex.EncodeToString(key), base64.StdEncoding.EncodeToString(key)
	r.on(n, "mkdir", "-p", "/etc/munge")
	if _, err := n.RunIn(r.ctx, lab.Root, string(key), "sh", "-c", "cat >/etc/munge/munge.key"); err != nil {
		t.Fatal(err)
	}
	r.on(n, "sluice", "ca", "init", "--dir", "/etc/sluice/tls")
	r.on(n, "sluice", "ca", "issue", n.Name, "--dir", "/etc/sluice/tls")
	pem := r.on(n, "cat", "/etc/sluice/tls/"+n.Name+".key")
	secrets["certificate's key"] = strings.Split(pem, "\n")[1]

	yaml := filepath.Join(n.Dir, "etc/sluice.yaml")
	text, err := os.ReadFile(yaml)
	r.must(err)
	r.put(yaml, string(text)+"# proxy: http://admin:"+secret("password in a URL of sluice.yaml")+"@proxy:3128\n# password: "+secret("password in a comment")+"\n")
	log := filepath.Join(r.dir, "sluiced.log")
	r.must(os.WriteFile(log, []byte("level=INFO msg=ready\n"+pem+"level=DEBUG token="+secret("token in the log")+" url=https://u:"+secret("URL in the log")+"@x/y\n"+
		"MUNGE:"+secret("credential in the log")+"AwQ:\nkey "+secrets["munge.key in base64"]+" "+secrets["munge.key in hex"]+"\nAuthorization: Bearer "+secret("bearer")+"\nlevel=INFO msg=\"the end\"\n"), 0o600))
	r.slurm("reconfigure", map[string]string{"JobCompPass": secret("slurm.conf"), "JobCompUser": "x"})
	r.put(r.Path("etc/plugstack.conf"), "include /etc/slurm/plugstack.conf.d/*.conf\noptional other.so password="+secret("plug-in of others")+"\n")

	out := filepath.Join(r.dir, "report.tar.gz")
	report := func(args ...string) (string, error) {
		return n.Run(r.ctx, lab.Root, append([]string{"env", "SLUICE_API_TOKEN=" + secret("environment"), "sluice", "bugreport", "--log", log, "--out", out}, args...)...)
	}
	if said, err := report(); err != nil || !strings.Contains(said, out) {
		t.Fatalf("%v %s", err, said)
	}
	fi, err := os.Stat(out)
	r.must(err)
	if fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", fi.Mode())
	}
	parts, whole := unpack(t, out)
	for what, s := range secrets {
		if bytes.Contains(whole, []byte(s)) {
			for name, text := range parts {
				if strings.Contains(text, s) {
					t.Errorf("%s has the %s", name, what)
				}
			}
		}
	}
	for name, want := range map[string]string{
		"README": "Made by sluice bugreport", "versions": "sluice version", "sluice.yaml": "proxy: http://[removed]@proxy:3128", "check": "good; node", "health": "answers", "gpus": n.Name, "list": "LEASE", "slurm-check": "licences",
		"slurm.conf": "Licenses=rgpu:100", "plugstack.conf": "password=[removed]", "sluiced.log": "the end", "environment": "SLUICE_API_TOKEN=[removed]", "audit": "", "metrics": "sluice_build_info", "files": "host.db", "machine": "MemTotal",
		"driver": "", "kernel": "", "unit": "", "top": "",
	} {
		if text, ok := parts[name]; !ok || !strings.Contains(text, want) {
			t.Errorf("part %s has no %q:\n%.600s", name, want, text)
		}
	}
	if strings.Contains(parts["slurm.conf"], "JobComp") {
		t.Error("slurm.conf has keys that do not matter")
	}
	before, err := os.ReadFile(out)
	r.must(err)
	if said, err := report(); err == nil || !strings.Contains(err.Error(), "is not overwritten") {
		t.Errorf("over a report that is there: %v %s", err, said)
	}
	if after, err := os.ReadFile(out); err != nil || !bytes.Equal(before, after) {
		t.Errorf("a report that was there has changed: %v", err)
	}
	r.must(os.Remove(out))
	r.must(os.Symlink("/etc/passwd", out))
	if said, err := report(); err == nil || !strings.Contains(err.Error(), "is not overwritten") {
		t.Errorf("through a link: %v %s", err, said)
	}
	r.must(os.Remove(out))

	// Without daemon and configuration there is a report all the same: then it is needed most.
	r.must(n.Stop("sluiced"))
	r.must(os.Chmod(yaml, 0o666))
	if said, err := report(); err != nil {
		t.Errorf("without a daemon: %v %s", err, said)
	} else if parts, _ := unpack(t, out); !strings.Contains(parts["configuration-error"], "chmod go-w") || !strings.Contains(parts["health"], "connection refused") {
		t.Errorf("without a daemon: %q, %q", parts["configuration-error"], parts["health"])
	}
	_ = os.Remove(out)

	// A key that looks like no secret.
	if _, err := n.RunIn(r.ctx, lab.Root, "the rain in spain falls mainly\n", "sh", "-c", "cat >/etc/munge/munge.key"); err != nil {
		t.Fatal(err)
	}
	r.must(os.WriteFile(log, []byte("he says that the rain in spain falls mainly in the plain\n"), 0o600))
	if said, err := report(); err == nil || !strings.Contains(err.Error(), "would have a key of this node; nothing is written") {
		t.Errorf("with a key in it: %v %s", err, said)
	}
	if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a report with a key was written: %v", err)
	}
}

// unpack returns the parts of a report, and all of its bytes.
func unpack(t *testing.T, path string) (map[string]string, []byte) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	parts := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(whole)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return parts, whole
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil || h.Mode != 0o600 {
			t.Fatalf("%s: mode %o, %v", h.Name, h.Mode, err)
		}
		parts[strings.TrimPrefix(h.Name, "sluice-bugreport/")] = string(text)
	}
}
