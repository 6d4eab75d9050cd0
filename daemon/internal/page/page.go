// Package page serves what a daemon knows as pages for a browser: the pool's GPUs with who holds
// what, and each job. It only reads, and the pages need no script. What jobs and users are called is a
// stranger's text: html/template escapes it, and the pages' policy lets a browser load nothing but
// the one style sheet.
package page

import (
	"bytes"
	"context"
	"crypto/subtle"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/jobreport"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/usernames"
)

//go:embed page.html style.css
var files embed.FS

var pages = template.Must(template.New("").Funcs(template.FuncMap{"bytes": form.ShortBytes, "duration": jobreport.Duration, "ago": ago, "bar": bar, "millis": millis}).ParseFS(files, "page.html"))

const (
	// askTime is how long the owners may take for a page; one that is silent is shown as that.
	askTime = 3 * time.Second
	// keptFor is how long an answer serves further requests, so that many browsers ask the owners
	// no more often than one.
	keptFor = 2 * time.Second
)

// Config says what is served.
type Config struct {
	Node  string
	Stats func(context.Context) (rpc.Stats, error)  // this node's GPUs and leases
	Pools func(context.Context) ([]rpc.Pool, error) // all pools
	// Nameless leaves out whose leases they are: job, user, account, program.
	Nameless bool
	// Token is what each request must send as "Authorization: Bearer TOKEN". If it is empty, a request
	// must name this machine in its Host header: scripts of other sites cannot.
	Token string
	Log   *slog.Logger
}

// Server has the pages.
type Server struct {
	cfg     Config
	history history

	mu   sync.Mutex // held while the owners are asked, so that requests of the same time share one answer
	last *state

	names usernames.Names
}

// state is what the daemon and all owners answered at one time.
type state struct {
	at    time.Time
	stats rpc.Stats
	pools []rpc.Pool
	err   error

	make sync.Once // of page
	page func(http.ResponseWriter)
}

// New makes the pages.
func New(cfg Config) *Server { return &Server{cfg: cfg, names: usernames.Names{Age: 10 * time.Minute}} }

// ReadToken reads a token's file: at least 16 printable characters, in a regular file of this daemon's user that nobody
// else can read.
func ReadToken(path string) (string, error) {
	// O_NONBLOCK: a FIFO is refused, not waited for.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return "", errors.New(path + ": no regular file")
	case int(st.Uid) != os.Geteuid():
		return "", fmt.Errorf("%s: belongs to user %d, who could change it; chown it to %d", path, st.Uid, os.Geteuid())
	case st.Mode&0o077 != 0:
		return "", errors.New(path + ": others can read it; chmod 600")
	}
	b, err := io.ReadAll(io.LimitReader(f, 4<<10))
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(b))
	if len(token) < 16 || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", errors.New(path + ": a token has 16 printable characters at least; openssl rand -hex 32 makes one")
	}
	return token, nil
}

// Run takes the samples of the history until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	t := time.NewTicker(Every)
	defer t.Stop()
	for {
		ask, cancel := context.WithTimeout(ctx, askTime)
		stats, err := s.cfg.Stats(ask)
		cancel()
		if err == nil {
			s.history.sample(&stats)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// Serve answers on l until ctx ends.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	return limit.ServeHTTP(ctx, l, s.Handler(), s.cfg.Log)
}

// Handler answers requests.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		st := s.now(r.Context())
		st.make.Do(func() { st.page = s.render(http.StatusOK, "pool", s.poolView(st)) })
		st.page(w)
	})
	mux.HandleFunc("GET /job/{cluster}/{job}", func(w http.ResponseWriter, r *http.Request) {
		v := s.jobView(s.now(r.Context()), r.PathValue("cluster"), r.PathValue("job"))
		status := http.StatusOK
		if len(v.Leases) == 0 {
			status = http.StatusNotFound
		}
		s.render(status, "job", v)(w)
	})
	mux.HandleFunc("GET /style.css", func(w http.ResponseWriter, r *http.Request) {
		b, _ := files.ReadFile("style.css")
		w.Header().Set("Content-Type", "text/css; charset=utf-8")
		_, _ = w.Write(b)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		if !s.may(r) {
			if s.cfg.Token != "" {
				h.Set("WWW-Authenticate", "Bearer")
				http.Error(w, "this page wants the token of listen.page_token: Authorization: Bearer TOKEN", http.StatusUnauthorized)
				return
			}
			http.Error(w, "ask for this page by the name of its own machine: localhost, 127.0.0.1, [::1] or "+s.cfg.Node, http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// may reports whether a request is allowed.
func (s *Server) may(r *http.Request) bool {
	if s.cfg.Token != "" {
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		return ok && subtle.ConstantTimeCompare([]byte(token), []byte(s.cfg.Token)) == 1
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	ip := net.ParseIP(host)
	return host == "localhost" || host == s.cfg.Node || ip != nil && ip.IsLoopback()
}

// now returns the state of at most keptFor ago.
func (s *Server) now(ctx context.Context) *state {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && time.Since(s.last.at) < keptFor {
		return s.last
	}
	// Other requests wait for the same answer, so this one's end does not cancel it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTime)
	defer cancel()
	st := &state{}
	var perr error
	st.stats, st.err = s.cfg.Stats(ctx)
	st.pools, perr = s.cfg.Pools(ctx)
	st.err, st.at = errors.Join(st.err, perr), time.Now()
	s.last = st
	return st
}

// render makes a page, which can be sent any number of times.
func (s *Server) render(status int, name string, v any) func(http.ResponseWriter) {
	var b bytes.Buffer
	if err := pages.ExecuteTemplate(&b, name, v); err != nil {
		s.cfg.Log.Error("the page cannot be made", "page", name, "error", err)
		return func(w http.ResponseWriter) {
			http.Error(w, "the page cannot be made; see the log of sluiced", http.StatusInternalServerError)
		}
	}
	return func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(status)
		_, _ = w.Write(b.Bytes())
	}
}
