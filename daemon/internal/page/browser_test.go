//go:build browser

// Tests in a real browser: `make test-page` installs Chromium and runs them. They are no part of `make test`, whose machines have no browser.

package page

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/html"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// attack is what a stranger may call a job to have somebody's browser do something: each part asks the server for /stolen, or would on a click.
const attack = `</title></td></style><script>new Image().src="/stolen?script"</script><img src="/stolen?img" onerror="new Image().src='/stolen?error'">` +
	`<svg onload="new Image().src='/stolen?load'"></svg><iframe src="/stolen?frame"></iframe><link rel="stylesheet" href="/stolen?css">` +
	`<style>@import "/stolen?import"; body { background: url(/stolen?ground) }</style><object data="/stolen?object"></object>` +
	`<a href="javascript:alert(1)" onclick="alert(1)">x</a><base href="http://127.0.0.1:1/">"'&{{.Node}}`

// visit is a page in the browser.
type visit struct {
	dom     *html.Node
	source  string // the document as the browser has it, as HTML
	picture image.Image
	asked   []string // what the browser asked the server for, besides the page
}

// browse has the browser show a page of a server, in a window of that size, and keeps the picture under a name.
func browse(t *testing.T, h http.Handler, path, size, name string) *visit {
	t.Helper()
	browser := os.Getenv("SLUICE_BROWSER")
	if browser == "" {
		browser = "chromium"
	}
	v := &visit{}
	var mu sync.Mutex
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		if r.URL.EscapedPath() != path {
			v.asked = append(v.asked, r.URL.RequestURI())
		}
		mu.Unlock()
		h.ServeHTTP(w, r)
	}))
	defer web.Close()
	pictures := os.Getenv("SLUICE_PICTURES")
	if pictures == "" {
		pictures = t.TempDir()
	}
	file := filepath.Join(pictures, name+".png")
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	// Root has to leave Chromium's own sandbox out. It reaches this machine alone.
	cmd := exec.CommandContext(ctx, browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
		"--user-data-dir="+t.TempDir(), "--window-size="+size, "--dump-dom", "--screenshot="+file, web.URL+path)
	cmd.WaitDelay = time.Second
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v; is Chromium installed? make test-page does that\n%s", cmd, err, said.String())
	}
	v.source = string(out)
	if v.dom, err = html.Parse(bytes.NewReader(out)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("no picture: %v\n%s", err, said.String())
	}
	if v.picture, err = png.Decode(bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	v.asked = slices.DeleteFunc(slices.Clone(v.asked), func(s string) bool { return s == "/style.css" || s == "/favicon.ico" })
	return v
}

// text is what the page says.
func (v *visit) text() string {
	var b strings.Builder
	for n := range v.dom.Descendants() {
		if n.Type == html.TextNode {
			b.WriteString(n.Data)
		}
	}
	return b.String()
}

// has counts the pixels of a colour.
func (v *visit) has(c color.RGBA) (n int) {
	r := v.picture.Bounds()
	for y := r.Min.Y; y < r.Max.Y; y++ {
		for x := r.Min.X; x < r.Max.X; x++ {
			if color.RGBAModel.Convert(v.picture.At(x, y)) == c {
				n++
			}
		}
	}
	return n
}

// judge reports what no page of ours has: another element or attribute, a link elsewhere, a request.
func (v *visit) judge(t *testing.T) {
	t.Helper()
	elements := strings.Fields("html head meta title link body header a span main h1 h2 section p strong code dl dt dd svg rect polyline table thead tbody tr th td")
	attributes := strings.Fields("lang charset name content http-equiv rel href class id viewbox preserveaspectratio role aria-label width height points colspan")
	for n := range v.dom.Descendants() {
		if n.Type == html.CommentNode {
			t.Errorf("a comment: %q", n.Data)
		}
		if n.Type != html.ElementNode {
			continue
		}
		if !slices.Contains(elements, n.Data) {
			t.Errorf("an element <%s>", n.Data)
		}
		for _, a := range n.Attr {
			if !slices.Contains(attributes, strings.ToLower(a.Key)) {
				t.Errorf("<%s %s=%q>", n.Data, a.Key, a.Val)
			}
			if a.Key == "href" && (!strings.HasPrefix(a.Val, "/") || strings.HasPrefix(a.Val, "//")) {
				t.Errorf("a link to %q", a.Val)
			}
		}
	}
	if len(v.asked) > 0 {
		t.Errorf("the browser asked for %q", v.asked)
	}
}

// strange has every text of a stranger, and of another machine, be an attack.
func strange(c *Config) {
	stats, pools := site(2)
	for i := range stats.Leases {
		l := &stats.Leases[i]
		l.Request.Key.Cluster, l.Request.Key.Job = "cluster"+attack, "job"+attack
		l.Request.JobName, l.Request.Account, l.Host = "name"+attack, "account"+attack, "host"+attack
		for j := range l.Sessions {
			l.Sessions[j].Program = "program" + attack
		}
	}
	for i := range stats.GPUs {
		stats.GPUs[i].GPU.Name = "GPU" + attack
	}
	stats.Node, stats.Version = "node"+attack, "version"+attack
	for i := range pools {
		pools[i].Name = "pool" + attack
		for j := range pools[i].Owners {
			o := &pools[i].Owners[j]
			o.Name, o.Error = "owner"+attack, "error"+attack
			for k := range o.Inventory.GPUs {
				o.Inventory.GPUs[k].Name = "far" + attack
			}
		}
	}
	c.Stats = func(context.Context) (rpc.Stats, error) { return stats, errors.New("failure" + attack) }
	c.Pools = func(context.Context) ([]rpc.Pool, error) { return pools, nil }
}

// Colours of style.css on a light ground.
var (
	drawn  = color.RGBA{0x0b, 0x62, 0xa4, 0xff} // bars and lines
	warned = color.RGBA{0x7a, 0x3b, 0x00, 0xff}
)

// TestBrowser has a real browser show the pages. Pictures of them are kept in SLUICE_PICTURES.
func TestBrowser(t *testing.T) {
	silent := func(c *Config) {
		c.Pools = func(context.Context) ([]rpc.Pool, error) {
			return []rpc.Pool{{Name: "default", Owners: []rpc.PoolOwner{{Name: "gpu03", Error: "owner gpu03 cannot be asked: no route to host"}}}}, nil
		}
	}
	for _, c := range []struct {
		name, path    string
		width, height int
		gpus          int
		change        func(*Config)
		want          []string
		colour        color.RGBA
	}{
		{"pool", "/", 1280, 900, 4, nil, []string{"H100", "40 %", "37 %", "physics", hostile}, drawn},
		{"phone", "/", 390, 844, 4, nil, []string{"H100"}, drawn},
		{"job", "/job/main/101", 1280, 900, 4, nil, []string{"Job 101 of main", "40.0 %", "cuts", "41.5s", hostile}, drawn},
		{"job-phone", "/job/main/101", 390, 844, 4, nil, []string{"Job 101 of main"}, drawn},
		{"none", "/job/main/9", 1280, 600, 1, nil, []string{"This daemon knows no lease of such a job."}, warned},
		{"empty", "/", 1280, 600, 0, nil, []string{"This node lends no GPUs.", "No job has a fraction here."}, warned},
		{"silent", "/", 1280, 600, 1, silent, []string{"owners that do not answer: 1", "no route to host"}, warned},
		{"strange", "/", 1280, 2000, 2, strange, []string{"job" + attack, "name" + attack, "account" + attack, "host" + attack, "GPU" + attack, "far" + attack, "node" + attack,
			"version" + attack, "pool" + attack, "owner" + attack, "error" + attack, "failure" + attack}, warned},
		{"strange-job", "/job/" + url.PathEscape("cluster"+attack) + "/" + url.PathEscape("job"+attack), 1280, 900, 2, strange, []string{"Job job" + attack + " of cluster" + attack, "name" + attack, "program" + attack}, drawn},
		{"many", "/", 1280, 4000, 1000, nil, []string{"H100"}, drawn},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, _ := server(c.gpus, c.change)
			fill(s, c.gpus)
			v := browse(t, s.Handler(), c.path, fmt.Sprintf("%d,%d", c.width, c.height), c.name)
			v.judge(t)
			text := v.text()
			for _, want := range c.want {
				if !strings.Contains(text, want) {
					t.Errorf("the page lacks %q", want)
				}
			}
			if c.path == "/" && strings.Count(v.source, "<section") != c.gpus {
				t.Errorf("%d GPUs on the page", strings.Count(v.source, "<section"))
			}
			for n := range v.dom.Descendants() {
				if n.Data != "a" {
					continue
				}
				for _, a := range n.Attr {
					if code, _, _ := get(t, s, a.Val, nil); a.Key == "href" && code != 200 {
						t.Errorf("the link to %s: %d", a.Val, code)
					}
				}
			}
			if r := v.picture.Bounds(); r.Dx() != c.width || r.Dy() != c.height {
				t.Errorf("a picture of %v", r)
			}
			if n := v.has(c.colour); n < 50 { // the style sheet is in force
				t.Errorf("%d pixels of colour %v", n, c.colour)
			}
		})
	}
}

// altered changes a page, and perhaps its policy, on the way.
func altered(h http.Handler, policy bool, more string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		for k, v := range rec.Header() {
			w.Header()[k] = v
		}
		if !policy {
			w.Header().Del("Content-Security-Policy")
		}
		w.WriteHeader(rec.Code)
		_, _ = w.Write(bytes.Replace(rec.Body.Bytes(), []byte("</main>"), []byte(more+"</main>"), 1))
	})
}

// Where a text came through as markup all the same, the pages' policy would keep the browser from acting on it: it runs nothing, and asks no
// other server for anything. Without the policy it does, so the test would see it.
func TestBrowserPolicy(t *testing.T) {
	for policy, name := range map[bool]string{true: "policy", false: "no-policy"} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var stolen []string
			elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				stolen = append(stolen, r.URL.RawQuery)
			}))
			defer elsewhere.Close()
			s, _ := server(1, nil)
			v := browse(t, altered(s.Handler(), policy, strings.ReplaceAll(attack, "/stolen", elsewhere.URL+"/stolen")), "/", "1280,900", name)
			if !strings.Contains(v.source, "<iframe") {
				t.Error("the attack is not in the page")
			}
			mu.Lock()
			defer mu.Unlock()
			if policy && len(stolen) > 0 {
				t.Errorf("the browser asked elsewhere: %q", stolen)
			}
			for _, way := range []string{"script", "img", "error", "frame", "css", "import", "ground"} {
				if !policy && !slices.Contains(stolen, way) {
					t.Errorf("without the policy the browser did not ask elsewhere by %q: %q", way, stolen)
				}
			}
		})
	}
}

// A phone shows a page without scrolling to the side; its tables scroll by themselves. Chromium's own window is wider than a phone at
// least, so the page is in a frame.
func TestBrowserPhone(t *testing.T) {
	const measure = `<script>addEventListener("load", () => { const e = document.documentElement; parent.document.title = "width " + e.scrollWidth + " of " + innerWidth })</script>`
	for path, name := range map[string]string{"/": "narrow", "/job/main/101": "narrow-job"} {
		s, _ := server(4, nil)
		fill(s, 4)
		mux := http.NewServeMux()
		mux.Handle("/", altered(s.Handler(), false, measure))
		mux.HandleFunc("/phone", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `<!DOCTYPE html><title></title><iframe src="%s" style="border: 0; width: 390px; height: 844px"></iframe>`, path)
		})
		v := browse(t, mux, "/phone", "800,900", name)
		if !strings.Contains(v.source, "<title>width 390 of 390</title>") {
			t.Errorf("%s: %s", path, v.source[:min(len(v.source), 400)])
		}
	}
}
