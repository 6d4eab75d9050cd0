package store

// What is known of an image's content and costs more to find out than to read: numbers with names, in an extended
// attribute of the image's file. They follow from the content alone, so they stay right as long as the content is.
// An attribute that is damaged, or that belongs to other content, is not read: a part of a hash over the image's own
// hash and the facts stands before them. A process that may write the
// file may write the attribute too: both are the user's.

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// factsName is the attribute's name, maxFacts its longest value in bytes.
const (
	factsName = "user.sluice.facts"
	maxFacts  = 1 << 10
)

// sealed gives facts with what tells that they are this image's.
func sealed(sum Sum, facts string) string {
	h := sha256.Sum256(append(sum[:], facts...))
	return hex.EncodeToString(h[:8]) + " " + facts
}

// readFacts gives the facts of an image's open file, "" if there are none.
func readFacts(fd int, sum Sum) string {
	var b [maxFacts]byte
	n, err := unix.Fgetxattr(fd, factsName, b[:])
	if err != nil {
		return ""
	}
	_, facts, _ := strings.Cut(string(b[:n]), " ")
	if sealed(sum, facts) != string(b[:n]) {
		return ""
	}
	return facts
}

// Fact gives a number that SetFact has noted of an image's content, by a name without spaces and "=".
func (m *Image) Fact(name string) (uint64, bool) {
	for f := range strings.FieldsSeq(m.facts) {
		if k, v, _ := strings.Cut(f, "="); k == name {
			n, err := strconv.ParseUint(v, 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// SetFact notes a number of an image's content for those who open the image later. It is a help and no promise: where the
// file system has no such attributes, or the image is not in the store, nothing is noted. A note in a stored image's file is a change of it: who
// opens it next hashes it again.
func (s *Store) SetFact(sum Sum, m *Image, name string, n uint64) {
	fact := name + "=" + strconv.FormatUint(n, 10)
	if m.up != nil {
		m.up.facts = strings.TrimSpace(m.up.facts + " " + fact)
		return
	}
	if !m.stored {
		return
	}
	fd, err := unix.Open(s.path(sum), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	writeFacts(fd, sum, strings.TrimSpace(readFacts(fd, sum)+" "+fact))
}

func writeFacts(fd int, sum Sum, facts string) {
	if v := sealed(sum, facts); len(v) <= maxFacts {
		_ = unix.Fsetxattr(fd, factsName, []byte(v), 0)
	}
}
