package metrics

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
)

// Serve answers /metrics on l until ctx ends. Connections are bounded, and the
// oldest makes room for the newest, so that nobody can keep Prometheus out.
func Serve(ctx context.Context, l net.Listener, r *prometheus.Registry, log *slog.Logger) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 4,
		Timeout:             5 * time.Second,
	}))
	return limit.ServeHTTP(ctx, l, mux, log)
}
