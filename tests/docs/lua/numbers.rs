//! Numbers in the library's commands: each goes through `integer`. Redis writes a Lua number as C does: -0 becomes "-0"
//! and 1e17 "1e+17", and Redis accepts neither as an integer.

use sluicegate::limiter::redis::library::{LIBRARY, SOURCE};

use crate::support::redis::Redis;

/// Expressions that hold text: names of keys and fields, packed bytes, and values read from Redis.
const TEXTS: [&str; 20] = [
    "cell.key",
    "cells[i].key",
    "tally.key",
    "provider.key",
    "keys[1]",
    "keys[2]",
    "keys[i]",
    "key",
    "state_key",
    "mine",
    "own",
    "field",
    "fields[i]",
    "LOST",
    "state",
    "limits",
    "tally.known_text",
    "chunks[i]",
    "chunks[i + 1]",
    // Made by `integer`.
    "ttl",
];

/// Functions and values that are text.
const MAKES_TEXT: [&str; 3] = ["encode(", "sub(", "integer("];

/// Arguments of a call whose text begins after its opening parenthesis.
fn arguments(text: &str) -> Vec<String> {
    let (mut depth, mut arguments, mut current) = (0, Vec::new(), String::new());
    let mut quoted = false;
    for letter in text.chars() {
        quoted ^= letter == '\'';
        match letter {
            '(' | '[' if !quoted => depth += 1,
            ')' if !quoted && depth == 0 => break,
            ')' | ']' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                arguments.push(current.trim().to_owned());
                current.clear();
                continue;
            }
            _ => {}
        }
        current.push(letter);
    }
    arguments.push(current.trim().to_owned());
    arguments
}

fn is_text(argument: &str) -> bool {
    let literal = argument.starts_with('\'') && argument.ends_with('\'');
    literal || TEXTS.contains(&argument) || MAKES_TEXT.iter().any(|maker| argument.starts_with(maker))
}

#[test]
fn no_command_holds_a_raw_number() {
    let calls: Vec<Vec<String>> = SOURCE.split("redis.call(").skip(1).map(arguments).collect();
    assert!(calls.len() > 25, "only {} commands were found", calls.len());
    let raw: Vec<&Vec<String>> = calls.iter().filter(|call| !call.iter().all(|argument| is_text(argument))).collect();
    assert!(raw.is_empty(), "wrap each number in integer(): {raw:#?}");
    let made: Vec<&str> = SOURCE.lines().filter(|line| line.contains("local ttl = ")).collect();
    assert!(made.iter().all(|line| line.contains("local ttl = integer(")), "{made:?}");
    for raw in ["redis.call('LINDEX', cell.key, middle)", "redis.call('LTRIM', cell.key, place, -1)"] {
        assert!(!arguments(raw.split_once('(').unwrap().1).iter().all(|argument| is_text(argument)), "{raw}");
    }
    assert!(
        !SOURCE.contains("tostring") && !SOURCE.contains("redis.pcall"),
        "a number may reach a command another way"
    );
}

/// The numbers that Lua and Redis write in an odd way, through the library's own function.
#[test]
fn numbers_reach_redis_as_integers() {
    let begin = SOURCE.find("local function integer").unwrap();
    let function = SOURCE[begin..].lines().next().unwrap();
    let script = format!(
        "local format = string.format {function} local out = {{}} \
         for i, number in ipairs({{ math.ceil(-1 / 2), 0, -1, 99999999999999, 1e14, 1e17, 2 ^ 53 }}) do \
         out[i] = redis.call('ECHO', integer(number)) end return out"
    );
    let mut connection = Redis::shared().connection();
    Redis::load(&LIBRARY, &mut connection);
    let written: Vec<String> = redis::cmd("EVAL").arg(script).arg(0).query(&mut connection).unwrap();
    let integers = ["0", "0", "-1", "99999999999999", "100000000000000", "100000000000000000", "9007199254740992"];
    assert_eq!(written, integers);
}
