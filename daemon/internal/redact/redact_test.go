package redact

import (
	"strings"
	"testing"
)

func TestText(t *testing.T) {
	const secret = "hunter2Zx9"
	for _, text := range []string{
		"-----BEGIN PRIVATE KEY-----\nhunter2Zx9\n-----END PRIVATE KEY-----\n",
		"-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\nhunter2Zx9",
		"StoragePass=hunter2Zx9", "password: hunter2Zx9", `{"token": "hunter2Zx9", "x": 1}`, `{"token":"hunter2Zx9"}`, "SLUICE_API_TOKEN='hunter2Zx9'", "DB_PASSWORD=\"a hunter2Zx9 b\"",
		"http://alice:hunter2Zx9@proxy:3128/", "https_proxy=http://hunter2Zx9@proxy", "mysql://u:hunter2Zx9@db/x", "curl --password hunter2Zx9 x", "x --token=hunter2Zx9", "--secret hunter2Zx9",
		"Authorization: Bearer hunter2Zx9", "authorization=Basic hunter2Zx9", "Cookie: hunter2Zx9", "MUNGE:hunter2Zx9AwQ:", "private_key=hunter2Zx9", "AuthKey=hunter2Zx9", "key: hunter2Zx9",
		"SLUICE_LEASE=hunter2Zx9", "sluice-worker --lease hunter2Zx9", `level=INFO msg="x" passphrase="hunter2Zx9"`, "env[AWS_SECRET]=hunter2Zx9",
	} {
		got := string(Text([]byte("before\n" + text + "\nafter")))
		if strings.Contains(got, secret) || !strings.Contains(got, "before\n") || !strings.Contains(got, Removed) {
			t.Errorf("%q becomes %q", text, got)
		}
		if !strings.HasSuffix(got, "after") && !strings.Contains(text, "BEGIN EC") {
			t.Errorf("%q: what follows is lost: %q", text, got)
		}
	}
	for from, want := range map[string]string{
		"lease=0123456789abcdef0123456789abcdef ended":            "lease=0123456789ab... ended",
		"x tGzv3JOkF0XG5Qx2TlKWIA0tGzv3JOkF0XG5Qx2TlKWIA= y":      "x " + Removed + " y",
		"tls: {ca: /etc/sluice/ca.pem, key: /etc/sluice/n1.key}":  "tls: {ca: /etc/sluice/ca.pem, key: /etc/sluice/n1.key}",
		"see /usr/lib/x86_64-linux-gnu/slurm/spank_sluice.so":     "see /usr/lib/x86_64-linux-gnu/slurm/spank_sluice.so",
		"GPU-5f2c1a90-0b1c-4d2e-8f30-112233445566 is well":        "GPU-5f2c1a90-0b1c-4d2e-8f30-112233445566 is well",
		"lease.silence: 4m, audit.keep: 8, users.uid_min: 1000":   "lease.silence: 4m, audit.keep: 8, users.uid_min: 1000",
		"unknown key lease.silense; is lease.silence meant?":      "unknown key lease.silense; is lease.silence meant?",
		"time=2026-11-23T06:00:00.123Z level=INFO msg=\"ready\"":  "time=2026-11-23T06:00:00.123Z level=INFO msg=\"ready\"",
		"AccountingStorageEnforce=associations,limits,qos":        "AccountingStorageEnforce=associations,limits,qos",
		"github.com/sluice-hpc/sluice/daemon/internal/host.(*H)":  "github.com/sluice-hpc/sluice/daemon/internal/host.(*H)",
		"http://127.0.0.1:7073/metrics and user@host in a mail":   "http://127.0.0.1:7073/metrics and user@host in a mail",
		"PrologFlags=Alloc,Contain\nSlurmdTimeout=300 sec\nx=y\n": "PrologFlags=Alloc,Contain\nSlurmdTimeout=300 sec\nx=y\n",
	} {
		if got := string(Text([]byte(from))); got != want {
			t.Errorf("%q becomes %q, want %q", from, got, want)
		}
	}
}

func TestKnown(t *testing.T) {
	var k Known
	k.Add([]byte("\x00\x01binary munge key\xff\n"))
	k.Add([]byte("-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqG\n-----END PRIVATE KEY-----\n"))
	k.Add([]byte("short"))
	for text, want := range map[string]bool{
		"x MIGHAgEAMBMGByqG y": true, "x 000162696e617279206d756e6765206b6579ff": true, "AAFiaW5hcnkgbXVuZ2Uga2V5/w==": true,
		"-----BEGIN PRIVATE KEY-----": false, "short": false, "nothing": false,
	} {
		if k.In([]byte(text)) != want {
			t.Errorf("%q: want %v", text, want)
		}
	}
}

func FuzzText(f *testing.F) {
	f.Add([]byte("password: x\n-----BEGIN X-----\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		once := Text(b)
		if len(once) > 16*len(b)+1024 {
			t.Errorf("%d bytes become %d", len(b), len(once))
		}
	})
}
