package metrics

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/klauspost/compress/gzhttp"
	"github.com/klauspost/compress/gzip"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
)

// scrapeTime bounds one scrape.
const scrapeTime = 5 * time.Second

// Serve answers /metrics on l until ctx ends. Connections are bounded, and the
// oldest makes room for the newest, so that nobody can keep Prometheus out.
func Serve(ctx context.Context, l net.Listener, r *prometheus.Registry, log *slog.Logger) error {
	// At its best speed this library needs a third of the time that promhttp's own compression takes.
	compressed, err := gzhttp.NewWrapper(gzhttp.CompressionLevel(gzip.BestSpeed))
	if err != nil {
		return err
	}
	all := compressed(promhttp.HandlerFor(r, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 4,
		DisableCompression:  true,
	}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", http.TimeoutHandler(all, scrapeTime, fmt.Sprintf("the metrics were not collected within %v", scrapeTime)))
	return limit.ServeHTTP(ctx, l, mux, log)
}
