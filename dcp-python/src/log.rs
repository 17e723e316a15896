//! Events of the library's tracing, as records of Python's `logging`.

use std::sync::Once;

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry;

/// Passes events on to the logger `distcp`, from the first call on.
///
/// The level is that of the logger at that time, so that an event which nobody would see takes no GIL: bytes move on
/// other threads than Python's. In a program that has a subscriber already, such as the command, that one stays.
pub(crate) fn start(py: Python<'_>) {
    static STARTED: Once = Once::new();
    let level = level(py).unwrap_or(Level::WARN);
    STARTED.call_once(|| {
        let subscriber = registry().with(ToPython { level });
        let _ = tracing::subscriber::set_global_default(subscriber);
    });
}

fn level(py: Python<'_>) -> PyResult<Level> {
    let number: u32 = logger(py)?.call_method0("getEffectiveLevel")?.extract()?;
    Ok(match number {
        ..10 => Level::TRACE,
        10..20 => Level::DEBUG,
        20..30 => Level::INFO,
        30..40 => Level::WARN,
        40.. => Level::ERROR,
    })
}

fn logger(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import("logging")?.call_method1("getLogger", ("distcp",))
}

/// Logs a note of a job.
pub(crate) fn note(text: &str) {
    Python::attach(|py| {
        // A logger that fails costs a note, not the job.
        let _ = logger(py).and_then(|logger| logger.call_method1("warning", ("%s", text)));
    });
}

struct ToPython {
    level: Level,
}

impl<S: Subscriber> Layer<S> for ToPython {
    fn enabled(&self, metadata: &tracing::Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= self.level && metadata.target().starts_with("dcp")
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let number = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            _ => 10,
        };
        Python::attach(|py| {
            let _ =
                logger(py).and_then(|logger| logger.call_method1("log", (number, "%s", text.0)));
        });
    }
}

/// The message of an event, then its fields.
#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            "message" => self.0.insert_str(0, &format!("{value:?}")),
            name => self.0.push_str(&format!(" {name}={value:?}")),
        }
    }
}
