// Package redact takes secrets out of texts that leave a site: keys, passwords, tokens, credentials. It knows them by their form
// and by the name before them, so it removes too much rather than too little.
package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

// Removed stands where a secret was.
const Removed = "[removed]"

var (
	// PEM is any block of it, certificates too; what was cut off in the middle goes to the end.
	pemBlock = pattern.New(`(?s)-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\z)`)
	// A munge credential.
	munge = pattern.New(`MUNGE:[A-Za-z0-9+/=]*:?`)
	// The user part of a URL.
	userinfo = pattern.New(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@"'<>]+@`)
	// What follows the name of a secret: password: x, "token": "x", PASS=x, --secret x, Authorization: Bearer x.
	named = pattern.New(`(?i)((?:["']?[A-Za-z0-9_.-]*(?:passwd|password|passphrase|pass|secret|token|apikey|api_key|private_key|credentials?|authorization|cookie|SLUICE_LEASE)["'\]]?\s*[=:]|--(?:password|pass|secret|token|lease|key))\s*(?:bearer\s+|basic\s+)?)("[^"\n]*"|'[^'\n]*'|[^\s,;}"']+)`)
	// A value of the key named key, unless it is a path.
	key = pattern.New(`(?i)(\b[A-Za-z0-9_.-]*key["']?\s*[=:]\s*)("[^"/\n][^"\n]*"|'[^'/\n][^'\n]*'|[^\s,;}"'/][^\s,;}]*)`)
	// A long row of digits: an id, whose beginning is enough to tell it from others, or a token.
	long = pattern.New(`\b[0-9a-fA-F]{24,}\b`)
	// The id of a GPU and such, which is no secret.
	uuid = pattern.New(`\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
	// A row of base64.
	base64ish = pattern.New(`[A-Za-z0-9+/_-]{32,}={0,2}`)
)

// kept is how much of an id stays, in letters.
const kept = 12

// Text is b without its secrets.
func Text(b []byte) []byte {
	b = pemBlock().ReplaceAll(b, []byte(Removed))
	b = munge().ReplaceAll(b, []byte("MUNGE:"+Removed))
	b = userinfo().ReplaceAll(b, []byte("${1}"+Removed+"@"))
	b = named().ReplaceAll(b, []byte("${1}"+Removed))
	b = key().ReplaceAll(b, []byte("${1}"+Removed))
	b = long().ReplaceAllFunc(b, func(m []byte) []byte { return append(bytes.Clone(m[:kept]), "..."...) })
	return base64ish().ReplaceAllFunc(b, func(m []byte) []byte {
		if random(m) && !uuid().Match(m) {
			return []byte(Removed)
		}
		return m
	})
}

// random says whether letters look like those of a secret in base64 and not like a path or a name.
func random(m []byte) bool {
	var upper, lower, digit, separators, changes int
	kind := 0
	for _, c := range m {
		now := kind
		switch {
		case c >= 'A' && c <= 'Z':
			upper++
			now = 1
		case c >= 'a' && c <= 'z':
			lower++
			now = 2
		case c >= '0' && c <= '9':
			digit++
			now = 3
		case c == '/' || c == '-' || c == '_':
			separators++
		}
		if now != kind {
			changes++
		}
		kind = now
	}
	return upper > 0 && lower > 0 && digit > 0 && separators <= len(m)/8 && changes >= len(m)/4
}

// Known are secrets that are known, as the contents of a key's file.
type Known [][]byte

// least is the length from which a part of a secret is looked for.
const least = 12

// Add remembers the contents of a file: as they are, their lines, and how they are written in base64 and in hexadecimal digits.
func (k *Known) Add(contents []byte) {
	forms := bytes.Split(contents, []byte("\n"))
	forms = append(forms, contents)
	for _, f := range forms {
		f = bytes.TrimSpace(f)
		if len(f) < least || bytes.HasPrefix(f, []byte("-----")) {
			continue
		}
		*k = append(*k, f, []byte(hex.EncodeToString(f)), []byte(base64.StdEncoding.EncodeToString(f)))
	}
}

// In says whether b has one of them.
func (k Known) In(b []byte) bool {
	for _, s := range k {
		if bytes.Contains(b, s) {
			return true
		}
	}
	return false
}
