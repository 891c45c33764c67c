//! Redacted address: without user name and password, and without the values of its parameters.
//!
//! Addresses of providers may contain a signature or a key (`?sig=…`). The names of parameters stay, so that an
//! operator can tell two addresses apart. Segments of the path stay, because it is not known which of them is a secret.

/// Replacement for a hidden part. No address has this character unescaped.
pub const REDACTED: char = '…';

/// The address without possible secrets. A parameter whose whole value is a placeholder (`${job:id}`) keeps it.
pub fn redact_url(text: &str) -> String {
    let (text, fragment) = text.split_once('#').map_or((text, false), |(text, _)| (text, true));
    let (address, query) = text.split_once('?').map_or((text, None), |(address, query)| (address, Some(query)));
    let mut shown = redact_credentials(address);
    if let Some(query) = query {
        let parameters: Vec<String> = query.split('&').map(redact_parameter).collect();
        shown.push('?');
        shown.push_str(&parameters.join("&"));
    }
    if fragment {
        shown.push('#');
        shown.push(REDACTED);
    }
    shown
}

/// Change of an address, in a form without secrets.
pub fn describe_url_change(from: &str, to: &str) -> String {
    let (from, to) = (redact_url(from), redact_url(to));
    if from == to { format!("{to} (another value of a parameter)") } else { format!("{from} → {to}") }
}

/// Whether an address was redacted, and so is not complete.
pub fn has_redaction(url: &str) -> bool {
    url.contains(REDACTED)
}

fn redact_parameter(text: &str) -> String {
    match text.split_once('=') {
        _ if text.is_empty() => String::new(),
        Some((name, value)) if value.is_empty() || is_placeholder(value) => format!("{name}={value}"),
        Some((name, _)) => format!("{name}={REDACTED}"),
        // Text without `=` is a value.
        None => REDACTED.to_string(),
    }
}

fn is_placeholder(value: &str) -> bool {
    let name = value.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
    name.is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || matches!(byte, b':' | b'_')))
}

/// Parsers accept any number of slashes, of both kinds, after the scheme.
fn redact_credentials(address: &str) -> String {
    let after_scheme = address.find(':').map_or(0, |colon| colon + 1);
    let start = after_scheme + address[after_scheme..].bytes().take_while(|byte| matches!(byte, b'/' | b'\\')).count();
    let (scheme, rest) = address.split_at(start);
    let end = rest.find(['/', '\\']).unwrap_or(rest.len());
    let host = rest[..end].rsplit('@').next().unwrap_or_default();
    // The password may hold a slash that is not escaped: then the apparent path belongs to the password.
    let is_host =
        host.split_once(']').map_or(host, |(_, port)| port).split_once(':').is_none_or(|(_, port)| is_port(port));
    let end = if is_host { end } else { rest.len() };
    match rest[..end].rfind('@') {
        Some(at) => format!("{scheme}{REDACTED}{}", &rest[at..]),
        None => address.to_owned(),
    }
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_value_change_is_reported_without_the_value() {
        let change = |from, to| describe_url_change(from, to);
        assert_eq!(
            change("https://a.example/?s=1", "https://b.example/?s=1"),
            "https://a.example/?s=… → https://b.example/?s=…"
        );
        assert_eq!(
            change("https://a.example/?s=1", "https://a.example/?s=2"),
            "https://a.example/?s=… (another value of a parameter)"
        );
    }

    #[test]
    fn values_and_credentials_are_redacted() {
        for (url, shown) in [
            ("https://pay.example/charges", "https://pay.example/charges"),
            ("https://pay.example/charges?sig=hunter2", "https://pay.example/charges?sig=…"),
            ("https://pay.example/?a=hunter2&b=&sig=hunter2=hunter2", "https://pay.example/?a=…&b=&sig=…"),
            ("https://pay.example/?hunter2", "https://pay.example/?…"),
            ("https://pay.example/?a=1;b=hunter2?c=hunter2", "https://pay.example/?a=…"),
            ("https://pay.example/#hunter2", "https://pay.example/#…"),
            ("https://pay.example/?a=b#c?d=hunter2", "https://pay.example/?a=…#…"),
            ("https://user:hunter2@pay.example/charges", "https://…@pay.example/charges"),
            ("https://hunter2@pay.example:8443/", "https://…@pay.example:8443/"),
            ("https://user:hunter2@x@pay.example/", "https://…@pay.example/"),
            ("https:user:hunter2@pay.example/", "https:…@pay.example/"),
            ("https:\\\\user:hunter2@pay.example/", "https:\\\\…@pay.example/"),
            ("https://user:/hunter2@pay.example/", "https://…@pay.example/"),
            ("https://user:hunter/2@pay.example/", "https://…@pay.example/"),
            ("https://pay.example:8443/@shop/charges", "https://pay.example:8443/@shop/charges"),
            ("https://[2001:db8::1]:8443/@shop/", "https://[2001:db8::1]:8443/@shop/"),
            ("https://pay.example/${job:reference}?id=${job:id}", "https://pay.example/${job:reference}?id=${job:id}"),
            ("https://pay.example/?id=x${job:id}&k=${HUNTER2}", "https://pay.example/?id=…&k=…"),
            ("pay.example/charges?sig=hunter2", "pay.example/charges?sig=…"),
            ("sqlite://ledger.db?mode=rwc", "sqlite://ledger.db?mode=…"),
            ("", ""),
        ] {
            assert_eq!(redact_url(url), shown, "{url}");
            assert_eq!(redact_url(shown), shown, "shown twice");
            assert!(!shown.to_lowercase().contains("hunter"), "{shown}");
            assert_eq!(has_redaction(shown), shown != url, "{url}");
        }
    }
}
