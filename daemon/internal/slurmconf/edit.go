package slurmconf

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

// Editing slurm.conf for a site. A comment above every changed line has the old line, and a checksum of the new one. Added lines are
// between two comments. The first comment has the checksum of the lines. So Remove restores the lines from before Add, whatever else
// was changed since, and Add after a change of the pools begins with Remove.

const (
	wasMark   = "#sluice-was "
	beginMark = "#sluice-begin %s: by sluice slurm setup, which takes it away again with --remove"
	endMark   = "#sluice-end"
)

var (
	wasLine   = pattern.New(`^#sluice-was ([0-9a-f]{8}): (.*)$`)
	beginLine = pattern.New(`^#sluice-begin ([0-9a-f]{8}):`)
)

func sum(line string) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(line))) }

// Remove returns a configuration file of Slurm's without what Add, or AddInclude, put into it. It is an error if a line that Add changed
// or added was changed again: the site's own text would be lost.
func Remove(path string, text []byte) ([]byte, error) {
	if text == nil {
		return nil, nil
	}
	lines := strings.SplitAfter(string(text), "\n")
	var out strings.Builder
	begun, added, inside := 0, "", ""
	for i := 0; i < len(lines); i++ {
		line := strings.TrimSuffix(lines[i], "\n")
		m := wasLine().FindStringSubmatch(line)
		b := beginLine().FindStringSubmatch(line)
		switch {
		case inside != "" && line == endMark:
			if sum(added) != inside {
				return nil, fmt.Errorf("%s:%d: the lines between this and %s were changed after sluice slurm setup; move what is the site's out of them, or take them and both comments out by hand", path, begun, endMark)
			}
			inside = ""
		case inside != "":
			added += line + "\n"
		case b != nil:
			begun, added, inside = i+1, "", b[1]
		case m == nil:
			out.WriteString(lines[i])
		case i+1 < len(lines) && sum(strings.TrimSuffix(lines[i+1], "\n")) == m[1]:
			i++
			out.WriteString(m[2] + lines[i][len(strings.TrimSuffix(lines[i], "\n")):])
		default:
			return nil, fmt.Errorf("%s:%d: the line below was changed after sluice slurm setup; take what is Sluice's out of it by hand, and this comment", path, i+1)
		}
	}
	if inside != "" {
		return nil, fmt.Errorf("%s:%d: no %s follows; take the lines of Sluice out by hand", path, begun, endMark)
	}
	return []byte(out.String()), nil
}

// AddInclude returns a plugstack.conf that includes its directory.
func AddInclude(path string, text []byte) []byte {
	return block(text, []string{"include " + path + ".d/*.conf"})
}

func block(text []byte, lines []string) []byte {
	if len(lines) == 0 {
		return text
	}
	out := bytes.Clone(text)
	if len(out) > 0 && out[len(out)-1] != '\n' {
		out = append(out, '\n')
	}
	added := strings.Join(lines, "\n") + "\n"
	return append(out, (fmt.Sprintf(beginMark, sum(added)) + "\n" + added + endMark + "\n")...)
}

// Add returns slurm.conf, which lies at path, with what the pools need: the lines of Conf, merged with those of the file. nodes are
// the NodeNames, as the file spells them, of the nodes whose jobs may ask; none means all. If something cannot be merged, the
// error says what to do by hand.
func (t Table) Add(path string, text []byte, nodes []string) ([]byte, error) {
	text, err := Remove(path, text)
	if err != nil {
		return nil, err
	}
	e := &edit{path: path, nodes: map[string]bool{}, at: map[string]int{}}
	for _, n := range nodes {
		e.nodes[n] = false
	}
	e.read(string(text))
	if err := e.included(); err != nil {
		return nil, err
	}
	e.nodeLines(t.NodeGres())
	e.list("GresTypes", Gres)
	all := t.Licences()
	for _, l := range sorted(all) {
		if !strings.Contains(l, "@") {
			e.list("Licenses", fmt.Sprintf("%s:%d", l, all[l]))
		}
	}
	e.list("JobSubmitPlugins", "lua")
	e.list("PrologFlags", "Contain")
	for _, h := range hooks {
		e.hook(h.key, h.file)
	}
	if e.err != nil {
		return nil, e.err
	}
	var out strings.Builder
	for i, l := range e.lines {
		if l != e.was[i] {
			out.WriteString(wasMark + sum(l) + ": " + e.was[i] + "\n")
		}
		out.WriteString(l)
		if i+1 < len(e.lines) {
			out.WriteByte('\n')
		}
	}
	return block([]byte(out.String()), e.more), nil
}

// edit is a slurm.conf in the making. The first error stays.
type edit struct {
	path       string
	was, lines []string
	at         map[string]int // the last line of a key, by the key in small letters
	more       []string       // lines that are added at the end
	nodes      map[string]bool
	err        error
}

func (e *edit) read(text string) {
	e.was = strings.Split(text, "\n")
	e.lines = slices.Clone(e.was)
	for i, l := range e.lines {
		key, value, ok := setting(l)
		if !ok {
			continue
		}
		e.at[strings.ToLower(key)] = i
		if m := another().FindStringSubmatch(value); m != nil && !strings.EqualFold(key, "NodeName") {
			e.fail(i, "%s is not the first setting of its line; write it on a line of its own", m[1])
		}
	}
}

// another is one of the keys that are edited, behind another setting of the same line.
var another = pattern.New(`(?i)\s(GresTypes|Licenses|JobSubmitPlugins|PrologFlags|Prolog|Epilog|PrologSlurmctld|EpilogSlurmctld)\s*=`)

func (e *edit) fail(line int, format string, a ...any) {
	if e.err == nil {
		e.err = fmt.Errorf("%s:%d: %s; sluice slurm conf prints what the file needs", e.path, line+1, fmt.Sprintf(format, a...))
	}
}

// setting is the first key of a line and all that is to the right of its =, without the comment.
func setting(line string) (key, value string, ok bool) {
	code, _ := comment(line)
	key, value, ok = strings.Cut(strings.TrimSpace(code), "=")
	return strings.TrimSpace(key), strings.TrimSpace(value), ok
}

// comment divides a line where its comment begins. The space before it is the comment's.
func comment(line string) (code, rest string) {
	end := len(line)
	for i := range len(line) {
		if line[i] == '#' && (i == 0 || line[i-1] != '\\') {
			end = i
			break
		}
	}
	code = strings.TrimRight(line[:end], " \t\r")
	return code, line[len(code):]
}

// whole fails for a line that goes on in the next one, or is the rest of one before.
func (e *edit) whole(i int) bool {
	continued := func(i int) bool { return i >= 0 && strings.HasSuffix(strings.TrimRight(e.lines[i], " \t\r"), `\`) }
	if continued(i) || continued(i-1) {
		e.fail(i, "the line is continued by a backslash; write it as one line, or add Sluice's part by hand")
		return false
	}
	return true
}

// list adds an item to a key whose value is a list with commas. An item of that name, up to a colon, is replaced.
func (e *edit) list(key, item string) {
	i, ok := e.at[strings.ToLower(key)]
	if !ok {
		for j, l := range e.more {
			if strings.HasPrefix(l, key+"=") {
				e.more[j] += "," + item
				return
			}
		}
		e.more = append(e.more, key+"="+item)
		return
	}
	name, _, _ := strings.Cut(item, ":")
	_, value, _ := setting(e.lines[i])
	if strings.ContainsAny(value, " \t\"'") {
		e.fail(i, "the value of %s has spaces or quotes; write it without, on a line of its own", key)
		return
	}
	items := list(value)
	found := false
	for j, have := range items {
		if n, _, _ := strings.Cut(have, ":"); strings.EqualFold(n, name) {
			found = true
			if !strings.EqualFold(have, item) {
				items[j] = item
			}
		}
	}
	if !found {
		items = append(items, item)
	}
	if now := strings.Join(items, ","); now != value && e.whole(i) {
		_, rest := comment(e.lines[i])
		written, _, _ := strings.Cut(e.lines[i], "=")
		e.lines[i] = written + "=" + now + rest
	}
}

// hook names our script where none is named. A site's own script has to have our line.
func (e *edit) hook(key, file string) {
	ours := Scripts + "/" + file + ".sh"
	i, ok := e.at[strings.ToLower(key)]
	if !ok {
		e.more = append(e.more, key+"="+ours)
		return
	}
	_, value, _ := setting(e.lines[i])
	var files []string
	for _, p := range list(value) {
		if match, err := filepath.Glob(p); err == nil && len(match) > 0 {
			files = append(files, match...)
		}
	}
	if found, _ := calls(files, "sluice "+file, ours); !found && value != ours {
		e.fail(i, "%s is the site's own: have it run %s, then run this again", value, ours)
	}
}

var gresOf = pattern.New(`(?i)(^|\s)(Gres=)(\S+)`)

// nodeLines adds the gres to the nodes' lines.
func (e *edit) nodeLines(gres string) {
	inherited, any := "", false
	for i, l := range e.lines {
		key, value, ok := setting(l)
		if !ok || !strings.EqualFold(key, "NodeName") {
			continue
		}
		name, _, _ := strings.Cut(value, " ")
		m := gresOf().FindStringSubmatch(value)
		if m != nil && strings.ContainsAny(m[3], "\"'") {
			e.fail(i, "Gres is in quotes; write it without")
		}
		if name == "DEFAULT" {
			// Lines below without a Gres of their own have this one, until another DEFAULT changes it.
			if m == nil {
				continue
			}
			if inherited = m[3]; len(e.nodes) > 0 {
				continue // it is of nodes that are not named too
			}
		} else if _, named := e.nodes[name]; named {
			e.nodes[name] = true
		} else if len(e.nodes) > 0 {
			continue
		}
		any = true
		if name != "DEFAULT" && m == nil && inherited != "" && len(e.nodes) == 0 {
			continue
		}
		code, rest := comment(l)
		switch {
		case m == nil && inherited != "":
			code += " Gres=" + inherited + "," + gres
		case m == nil:
			code += " Gres=" + gres
		case slices.ContainsFunc(list(m[3]), func(g string) bool { return g == Gres || strings.HasPrefix(g, Gres+":") }):
			continue
		default:
			code = gresOf().ReplaceAllString(code, "${1}${2}${3},"+gres)
		}
		if e.whole(i) {
			e.lines[i] = code + rest
		}
	}
	for _, n := range sorted(e.nodes) {
		if !e.nodes[n] && e.err == nil {
			e.err = fmt.Errorf("%s has no line that begins with NodeName=%s; give --nodes as the file has them", e.path, n)
		}
	}
	if !any && e.err == nil {
		e.err = fmt.Errorf("%s has no line with NodeName=; add Gres=%s to the nodes whose jobs may ask, where they are", e.path, gres)
	}
}

// included looks into the files that slurm.conf includes: they are not edited, so they may have none of the keys.
func (e *edit) included() error {
	keys := []string{"nodename", "grestypes", "licenses", "jobsubmitplugins", "prologflags"}
	for _, h := range hooks {
		keys = append(keys, strings.ToLower(h.key))
	}
	for _, l := range e.lines {
		f := strings.Fields(l)
		if len(f) < 2 || !strings.EqualFold(f[0], "include") {
			continue
		}
		file := f[1]
		if !filepath.IsAbs(file) {
			file = filepath.Join(filepath.Dir(e.path), file)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			continue // Slurm says so itself
		}
		for line := range strings.Lines(string(text)) {
			if key, _, ok := setting(line); ok && slices.Contains(keys, strings.ToLower(key)) {
				return fmt.Errorf("%s, which %s includes, has %s: add Sluice's part by hand; sluice slurm conf prints what is needed", file, e.path, key)
			}
		}
	}
	return nil
}
