package identity

import (
	"bytes"
	"testing"
)

// FuzzFrame is what a peer sends before it is known.
func FuzzFrame(f *testing.F) {
	var b bytes.Buffer
	_ = writeFrame(&b, frameCredential, []byte("MUNGE:AwQ=:"))
	f.Add(b.Bytes())
	f.Add([]byte{1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		kind, got, err := readFrame(r)
		if err == nil {
			if kind < frameCredential || kind > frameRefused || len(got) > maxFrame {
				t.Fatalf("kind %d, %d bytes", kind, len(got))
			}
			if r.Len() != len(in)-8-len(got) {
				t.Fatal("it read beyond the frame")
			}
			if plausible(got) == nil && bytes.ContainsAny(got, " \n\x00-") {
				t.Fatalf("%q is plausible", got)
			}
		}
		_, _, _ = readAnswer(bytes.NewReader(in), "gpu01")
	})
}

// FuzzDecoded is unmunge's output, in which the payload is the peer's.
func FuzzDecoded(f *testing.F) {
	p := payload(roleClient, "node01", [32]byte{1}, make([]byte, 32))
	f.Add([]byte("STATUS: 0\nUID: 0\nLENGTH: 5\n\nhello"))
	f.Add(p)
	f.Fuzz(func(t *testing.T, in []byte) {
		if _, said, err := parseDecoded(in); err == nil && !bytes.HasSuffix(in, said) {
			t.Fatal("a payload that was not there")
		}
		c, err := parsePayload(in)
		if err == nil && !bytes.EqualFold(payload(c.role, c.node, c.cert, c.channel), in) {
			t.Fatalf("%q is read as %+v", in, c)
		}
	})
}
