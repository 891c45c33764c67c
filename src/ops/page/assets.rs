//! The list of the page's files, by their path below `/assets/`: everything that a browser can get from here.
//!
//! A file that is not in the list is not served. A test compares the list with the folder.

use super::Asset;

const JS: &str = "text/javascript; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";

macro_rules! file {
    ($path:literal, $content_type:expr) => {
        Asset { path: $path, content_type: $content_type, body: include_bytes!(concat!("assets/", $path)) }
    };
}

pub(super) const INDEX: Asset = file!("index.html", "text/html; charset=utf-8");

pub(super) static ASSETS: &[Asset] = &[
    file!("css/base.css", CSS),
    file!("css/parts.css", CSS),
    file!("css/shell.css", CSS),
    file!("css/views.css", CSS),
    file!("icon.svg", SVG),
    file!("js/announce.js", JS),
    file!("js/api.js", JS),
    file!("js/chart.js", JS),
    file!("js/clears.js", JS),
    file!("js/clock.js", JS),
    file!("js/dialog.js", JS),
    file!("js/dom.js", JS),
    file!("js/early.js", JS),
    file!("js/format.js", JS),
    file!("js/histogram.js", JS),
    file!("js/history.js", JS),
    file!("js/main.js", JS),
    file!("js/parts.js", JS),
    file!("js/poll.js", JS),
    file!("js/printable.js", JS),
    file!("js/shell.js", JS),
    file!("js/theme.js", JS),
    file!("js/views/attention.js", JS),
    file!("js/views/bulk.js", JS),
    file!("js/views/card.js", JS),
    file!("js/views/change_limit.js", JS),
    file!("js/views/decide.js", JS),
    file!("js/views/job.js", JS),
    file!("js/views/job_table.js", JS),
    file!("js/views/jobs.js", JS),
    file!("js/views/overview.js", JS),
    file!("js/views/pause.js", JS),
    file!("js/views/provider.js", JS),
    file!("js/views/row.js", JS),
    file!("js/views/timeline.js", JS),
    file!("js/views/unrecorded.js", JS),
    file!("js/views/waiting_accounts.js", JS),
    file!("js/views/workers.js", JS),
    file!("js/words.js", JS),
    file!("vendor/uplot/uPlot.iife.min.js", JS),
    file!("vendor/uplot/uPlot.min.css", CSS),
];
