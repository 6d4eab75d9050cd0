package limit

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// ServeHTTP answers requests on l until ctx ends. Requests and their headers are bounded in time and
// size. Connections are bounded in number: the oldest of the address that has most makes room for the newest.
func ServeHTTP(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) error {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      15 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    8 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	table := New(Bounds{Pending: 64, PendingKey: 32})
	err := s.Serve(table.Listener(l, Address))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
