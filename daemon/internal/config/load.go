package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sort"
	"strings"
	"syscall"

	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"
)

// Flow: the file is parsed once, into nodes. walk compares them with the table of keys: it
// finds the keys that are unknown, and remembers the lines of the others. viper lays the
// environment over the same nodes. set parses each value into its field: viper's own
// conversions would take 1.5 for 1, and name neither key nor line. finish looks at the
// whole.

// maxFile is far beyond what a pool of thousands needs, in bytes.
const maxFile = 4 << 20

// Key is one key of the file.
type Key struct {
	Name  string // as in lease.silence
	Live  bool   // taken over by a reload
	OneOf string // the values it may have, a|b, or ""
	index []int
}

// Keys are all keys but the pools, in the order of the struct.
func Keys() []Key { return keys(reflect.TypeFor[Config](), "", nil) }

func keys(t reflect.Type, prefix string, at []int) []Key {
	var out []Key
	for i := range t.NumField() {
		f := t.Field(i)
		name := f.Tag.Get("key")
		if name == "" {
			continue
		}
		name = prefix + name
		index := append(append([]int{}, at...), i)
		if f.Type.Kind() == reflect.Struct {
			out = append(out, keys(f.Type, name+".", index)...)
			continue
		}
		out = append(out, Key{Name: name, Live: f.Tag.Get("live") == "yes", OneOf: f.Tag.Get("oneof"), index: index})
	}
	return out
}

// Value is the key's value in c, as the file would say it.
func (k Key) Value(c *Config) string {
	switch v := reflect.ValueOf(c).Elem().FieldByIndex(k.index).Interface().(type) {
	case []string:
		return "[" + strings.Join(v, ", ") + "]"
	default:
		return fmt.Sprint(v)
	}
}

// Load reads the file and the environment. A file that is missing is an error,
// but for "", which means the defaults and the environment alone.
func Load(path string) (*Config, error) {
	if path == "" {
		return Parse("", nil)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w; give its path by --config", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: not a regular file", path)
	}
	if sys := st.Sys().(*syscall.Stat_t); sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%s: belongs to uid %d; the configuration must belong to root: chown root %[1]s", path, sys.Uid)
	}
	if st.Mode().Perm()&0o022 != 0 {
		return nil, fmt.Errorf("%s: mode %04o lets others write it; chmod go-w %[1]s", path, st.Mode().Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("%s: larger than %d MiB", path, maxFile>>20)
	}
	return Parse(path, text)
}

// Parse is Load of a text; the errors contain name. It returns all errors at once.
func Parse(name string, text []byte) (*Config, error) {
	p := parser{name: name, line: map[string]int{}, known: map[string]bool{}, cfg: Default()}
	table := Keys()
	for _, k := range table {
		p.known[k.Name] = true
	}
	var doc, more yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		if bytes.Contains(text, []byte("\n\t")) {
			return nil, fmt.Errorf("%s: %w; a line begins with a tab: indent by spaces", name, err)
		}
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	switch err := dec.Decode(&more); {
	case errors.Is(err, io.EOF):
	case err != nil:
		return nil, fmt.Errorf("%s: %w", name, err)
	default:
		return nil, fmt.Errorf("%s:%d: a second document begins after ---; the file has one", name, more.Line)
	}
	if len(doc.Content) > 0 && doc.Content[0].Tag != "!!null" {
		p.walk(doc.Content[0], "")
	}
	p.environment(os.Environ())
	if err := errors.Join(p.errs...); err != nil {
		return nil, err
	}

	v, err := values(&doc)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	for _, k := range table {
		if !v.IsSet(k.Name) {
			continue
		}
		if err := set(reflect.ValueOf(&p.cfg).Elem().FieldByIndex(k.index), k.OneOf, v.Get(k.Name)); err != nil {
			p.fail(k.Name, "%w", err)
		}
	}
	p.finish()
	if err := errors.Join(p.errs...); err != nil {
		return nil, err
	}
	return &p.cfg, nil
}

// values are the file's, and the environment's over them.
func values(doc *yaml.Node) (*viper.Viper, error) {
	v := viper.New()
	v.SetEnvPrefix(envPrefix)
	v.SetEnvKeyReplacer(envName)
	v.AutomaticEnv()
	if doc.IsZero() {
		return v, nil
	}
	var file map[string]any
	if err := doc.Decode(&file); err != nil {
		return nil, err
	}
	return v, v.MergeConfigMap(file)
}

// A key's environment variable: lease.silence is SLUICE_LEASE_SILENCE.
const envPrefix = "SLUICE"

var envName = strings.NewReplacer(".", "_")

type parser struct {
	name   string
	known  map[string]bool
	line   map[string]int // of a key in the file
	pools  *yaml.Node
	parts  *yaml.Node
	quotas *yaml.Node
	cfg    Config
	errs   []error
}

// inEnv is the environment variable of a key, and whether the key's value is from there.
func (p *parser) inEnv(key string) (name string, ok bool) {
	name = envPrefix + "_" + strings.ToUpper(envName.Replace(key))
	return name, p.known[key] && os.Getenv(name) != ""
}

// given says whether a key has a value of the file's or the environment's.
func (p *parser) given(key string) bool {
	_, env := p.inEnv(key)
	return env || p.line[key] > 0
}

// where names the place that a key's value came from.
func (p *parser) where(key string) string {
	if name, ok := p.inEnv(key); ok {
		return "environment variable " + name
	}
	if n := p.line[key]; n > 0 {
		return fmt.Sprintf("%s:%d: %s", p.name, n, key)
	}
	return key
}

func (p *parser) fail(key, format string, a ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s: "+format, append([]any{p.where(key)}, a...)...))
}

func (p *parser) failAt(n *yaml.Node, format string, a ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s:%d: "+format, append([]any{p.name, n.Line}, a...)...))
}

// environment finds variables that are a key's but for a slip. Others that begin with SLUICE_ are programs'.
func (p *parser) environment(vars []string) {
	for _, v := range vars {
		name, _, _ := strings.Cut(v, "=")
		if !strings.HasPrefix(name, envPrefix+"_") {
			continue
		}
		var near []string
		for k := range p.known {
			of, _ := p.inEnv(k)
			if of == name {
				near = nil
				break
			}
			if distance(of, name) <= 2 {
				near = append(near, of)
			}
		}
		if sort.Strings(near); len(near) > 0 {
			p.errs = append(p.errs, fmt.Errorf("environment variable %s: no key has it; is %s meant?", name, strings.Join(near, " or ")))
		}
	}
}

// walk finds keys that are unknown, in the wrong case, twice there, or empty.
func (p *parser) walk(n *yaml.Node, prefix string) {
	if n.Kind != yaml.MappingNode {
		p.failAt(n, "%s wants keys of its own", strings.TrimSuffix("the file "+prefix, "."))
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		name := prefix + key.Value
		switch {
		case seen[name]:
			p.failAt(key, "key %s is there twice", name)
		case name == "pools":
			p.pools = val
		case name == "partitions":
			p.parts = val
		case name == "quotas":
			p.quotas = val
		case p.known[name]:
			p.line[name] = key.Line
			if val.Tag == "!!null" || val.Kind == yaml.MappingNode || val.Kind == yaml.AliasNode {
				p.failAt(key, "%s wants a value; leave the line out for the default", name)
			}
		case p.section(name):
			p.walk(val, name+".")
		default:
			p.failAt(key, "unknown key %s%s", name, p.like(name))
		}
		seen[name] = true
	}
}

func (p *parser) section(name string) bool {
	for k := range p.known {
		if strings.HasPrefix(k, name+".") {
			return true
		}
	}
	return false
}

// like offers a key that a mistyped one may have meant.
func (p *parser) like(name string) string {
	last := name[strings.LastIndex(name, ".")+1:]
	var near []string
	for k := range p.known {
		if d := distance(k, name); d <= 2 || strings.EqualFold(k[strings.LastIndex(k, ".")+1:], last) {
			near = append(near, k)
		}
	}
	if len(near) == 0 {
		return "; docs/admin.md has all of them"
	}
	sort.Strings(near)
	return "; is " + strings.Join(near, " or ") + " meant?"
}

// distance is Levenshtein's.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diag
			if a[i] != b[j] {
				d++
			}
			diag = row[j+1]
			row[j+1] = min(d, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
