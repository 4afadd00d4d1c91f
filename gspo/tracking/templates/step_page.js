"use strict";
// Draws the page of a recorded step. gspo/tracking/step_page.py describes the data.
// Texts come from the record, which may be anyone's: they are inserted with textContent only.
(() => {
  const SHADES = 5; // colours on either side of zero
  const MAX_LISTED = 1000; // responses in the list
  const MAX_SHOWN = 20000; // tokens of a response that are drawn at once
  const SAMPLED = 1;
  const IN_LOSS = 2; // of view 0; the next bits are those of the other views
  // the marks of clip bits, from the strongest to the weakest: bit, class, shade
  const CLIP_MARKS = [
    [8, "dual", 10],
    [1, "active", 9],
    [4, "bounded", 1],
    [2, "outside", 3],
  ];
  const BYTES = { uint8: 1, uint16: 2, uint32: 4, half: 2, constant: 4 };

  const byId = (id) => document.getElementById(id);
  const content = JSON.parse(byId("content").textContent);
  const { rows, passes, quantities, views } = content;
  const rowCount = rows.tokens.length;
  const rowBegins = beginsOf(rows.tokens); // of each row among the response tokens
  const promptBegins = beginsOf(rows.tokens.map((tokens, row) => tokens + rows.prompt_tokens[row]));
  const passesOfRows = rows.tokens.map(() => []);
  passes.rows.forEach((row, pass) => passesOfRows[row].push(pass));

  const state = {
    row: 0,
    pass: null, // null: no update had the row
    quantity: quantities[0],
    sort: "clipped_0",
    descending: true,
    order: [],
    token: 0,
    shown: MAX_SHOWN,
    numbers: null, // of the tokens of the chosen response in the chosen pass
    spans: [], // the elements of the tokens, by view
  };

  function beginsOf(lengths) {
    let sum = 0;
    return lengths.map((length) => {
      sum += length;
      return sum - length;
    });
  }

  function element(tag, text, className) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  // ------------------------------------------------------------------------------------------------
  // arrays
  // Return the numbers of an array from begin to end. Only their part of the text is decoded.
  function numbersOf(name, begin, end) {
    const encoding = content.encodings[name];
    const size = BYTES[encoding.encoding];
    const firstByte = begin * size;
    const text = byId("array-" + name).textContent;
    // four characters stand for three bytes
    const firstGroup = Math.floor(firstByte / 3);
    const characters = atob(text.slice(4 * firstGroup, 4 * Math.ceil((end * size) / 3)));
    const bytes = new Uint8Array((end - begin) * size);
    for (let i = 0; i < bytes.length; i++) {
      bytes[i] = characters.charCodeAt(firstByte - 3 * firstGroup + i);
    }
    const data = new DataView(bytes.buffer);
    const numbers = new Array(end - begin);
    for (let i = 0; i < numbers.length; i++) {
      if (encoding.encoding === "uint8") numbers[i] = data.getUint8(i);
      else if (encoding.encoding === "uint16") numbers[i] = data.getUint16(2 * i, true);
      else if (encoding.encoding === "uint32") numbers[i] = data.getUint32(4 * i, true);
      else if (encoding.encoding === "constant") numbers[i] = data.getFloat32(4 * i, true);
      else numbers[i] = half(data.getUint16(2 * i, true)) * encoding.scale;
    }
    return numbers;
  }

  // Return the float16 number with these bits.
  function half(bits) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }

  // Return the numbers of the chosen response's tokens, null if the page has no such array.
  function rowNumbers(name) {
    if (!content.encodings[name]) return null;
    const length = rows.tokens[state.row];
    if (content.encodings[name].encoding === "constant") {
      return new Array(length).fill(numbersOf(name, state.row, state.row + 1)[0]);
    }
    const begin = rowBegins[state.row];
    return numbersOf(name, begin, begin + length);
  }

  // The same in the chosen pass.
  function passNumbers(name) {
    if (!content.encodings[name] || state.pass === null) return null;
    const length = rows.tokens[state.row];
    if (content.encodings[name].encoding === "constant") {
      return new Array(length).fill(numbersOf(name, state.pass, state.pass + 1)[0]);
    }
    const begin = passes.begins[state.pass];
    return numbersOf(name, begin, begin + length);
  }

  function readNumbers() {
    const begin = promptBegins[state.row];
    const middle = begin + rows.prompt_tokens[state.row];
    const numbers = {
      prompt: numbersOf("tokens", begin, middle),
      tokens: numbersOf("tokens", middle, middle + rows.tokens[state.row]),
      flags: rowNumbers("flags"),
      log_ratio: passNumbers("log_ratio"),
      moved: passNumbers("moved"),
      entropy: passNumbers("entropy"),
      changed: passNumbers("changed"),
      mismatch: rowNumbers("mismatch"),
      views: [],
    };
    views.forEach((name, view) => {
      const weight = passNumbers("weight_" + view);
      const advantage = rowNumbers("advantage_" + view);
      numbers.views.push({
        weight,
        advantage,
        pull: weight && weight.map((value, i) => value * advantage[i]),
        gradient: passNumbers("gradient_" + view),
        clip: passNumbers("clip_" + view),
      });
    });
    return numbers;
  }

  function isInLoss(view, token) {
    return Boolean(state.numbers.flags[token] & (IN_LOSS << view));
  }

  // Return a number of a token in a view, NaN if it has none.
  function valueOf(key, view, token) {
    const ofView = ["weight", "advantage", "pull", "gradient", "clip"].includes(key);
    // tokens out of the loss have no such numbers
    if (ofView && !isInLoss(view, token)) return NaN;
    const values = ofView ? state.numbers.views[view][key] : state.numbers[key];
    return values ? values[token] : NaN;
  }

  function format(value) {
    if (typeof value === "string") return value === "nan" ? "–" : value;
    if (Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    return String(Number(value.toPrecision(4)));
  }

  function percent(value) {
    return typeof value === "string" ? format(value) : (100 * value).toFixed(1) + " %";
  }

  // ------------------------------------------------------------------------------------------------
  // the list of responses
  const columns = [
    { key: "row", title: "response", values: rows.tokens.map((_, row) => row) },
    { key: "group", title: "group", values: rows.group },
    { key: "task", title: "task", values: rows.task },
    { key: "problem", title: "problem", values: rows.problem },
    { key: "reward", title: "reward", values: rows.reward, show: format },
    { key: "tokens", title: "tokens", values: rows.tokens },
    { key: "finish", title: "finish", values: rows.finish },
    { key: "verdict", title: "verdict", values: rows.verdict },
  ];
  views.forEach((name, view) => {
    const suffix = views.length > 1 ? ", " + name : "";
    columns.push({
      key: "clipped_" + view,
      title: "clipped" + suffix,
      about: "share of its tokens in the loss whose gradient the clip removed",
      values: rows.clipped[view],
      show: percent,
    });
    columns.push({
      key: "weight_" + view,
      title: "weight" + suffix,
      about: content.encodings["gradient_" + view]
        ? "its share in the sum of |gradient| over all tokens"
        : "its share in the sum of |advantage × weight| over all tokens",
      values: rows.weight[view],
      show: percent,
    });
  });
  columns.push({
    key: "mismatch",
    title: "largest mismatch",
    about: "largest |trainer's minus engine's log-prob| of its tokens",
    values: rows.mismatch,
    show: format,
  });

  // Compare two values of a column. Numbers that are not finite are words, and come last.
  function compare(a, b) {
    if (typeof a !== typeof b) return typeof a === "string" ? 1 : -1;
    const order = a < b ? -1 : a > b ? 1 : 0;
    return state.descending ? -order : order;
  }

  function sortRows() {
    const column = columns.find((candidate) => candidate.key === state.sort);
    const listed = [...rows.tokens.keys()].filter(
      (row) => !byId("only-group").checked || rows.group[row] === rows.group[state.row],
    );
    listed.sort((a, b) => compare(column.values[a], column.values[b]) || a - b);
    state.order = listed;
  }

  function drawHead() {
    const line = element("tr");
    for (const column of columns) {
      const cell = element("th");
      const button = element("button");
      button.type = "button";
      button.dataset.sort = column.key;
      if (column.about) button.title = column.about;
      cell.append(button);
      line.append(cell);
    }
    byId("rows").tHead.append(line);
  }

  function drawList() {
    sortRows();
    const hidden = state.order.length - MAX_LISTED;
    byId("count").textContent =
      hidden > 0
        ? `The list has the first ${MAX_LISTED} of ${state.order.length} responses in this order.`
        : `${state.order.length} responses.`;
    for (const button of byId("rows").tHead.querySelectorAll("button")) {
      const column = columns.find((candidate) => candidate.key === button.dataset.sort);
      const isSorted = column.key === state.sort;
      button.textContent = column.title + (isSorted ? (state.descending ? " ↓" : " ↑") : "");
      const direction = state.descending ? "descending" : "ascending";
      button.parentNode.setAttribute("aria-sort", isSorted ? direction : "none");
    }
    const lines = document.createDocumentFragment();
    for (const row of state.order.slice(0, MAX_LISTED)) {
      const line = element("tr");
      line.dataset.row = row;
      columns.forEach((column, i) => {
        const value = column.values[row];
        const cell = element("td");
        if (i === 0) {
          const button = element("button", value);
          button.type = "button";
          cell.append(button);
        } else {
          cell.textContent = column.show ? column.show(value) : value;
        }
        line.append(cell);
      });
      lines.append(line);
    }
    byId("rows").tBodies[0].replaceChildren(lines);
    markList();
  }

  // Mark the chosen response and its group in the list.
  function markList() {
    for (const line of byId("rows").tBodies[0].rows) {
      const row = Number(line.dataset.row);
      line.className = rows.group[row] === rows.group[state.row] ? "same-group" : "";
      if (row === state.row) line.setAttribute("aria-current", "true");
      else line.removeAttribute("aria-current");
      // the list is one stop of the tab key
      line.querySelector("button").tabIndex = row === state.row ? 0 : -1;
    }
  }

  function goBeside(step) {
    const index = state.order.indexOf(state.row) + step;
    if (index < 0 || index >= state.order.length) return;
    chooseRow(state.order[index]);
  }

  function lineOf(row) {
    return byId("rows").tBodies[0].querySelector(`tr[data-row="${row}"]`);
  }

  // ------------------------------------------------------------------------------------------------
  // the chosen response
  function chooseRow(row) {
    state.row = row;
    state.pass = passesOfRows[row].length ? passesOfRows[row][0] : null;
    state.token = 0;
    state.shown = MAX_SHOWN;
    markList();
    const line = lineOf(row);
    if (line) {
      // scroll the list alone, not the page
      const list = line.closest(".list");
      const top = line.offsetTop - list.querySelector("thead").offsetHeight;
      const bottom = line.offsetTop + line.offsetHeight;
      if (top < list.scrollTop) list.scrollTop = top;
      else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    }
    drawResponse();
  }

  function drawResponse() {
    const row = state.row;
    state.numbers = readNumbers();
    byId("response-title").textContent = `Response ${row}, group ${rows.group[row]}`;
    const updates = passesOfRows[row].map((pass) => passes.updates[pass]);
    const facts = [
      `task ${rows.task[row]}`,
      `problem ${rows.problem[row]}`,
      `sample ${rows.sample[row]}`,
      `reward ${format(rows.reward[row])}`,
      `verdict ${rows.verdict[row]}`,
      `${rows.tokens[row]} tokens`,
      `finish reason ${rows.finish[row]}`,
      `sampled by the weights of step ${rows.policy_step[row]}`,
      updates.length ? `in update ${updates.join(", ")}` : "in no recorded update",
    ];
    byId("response-about").textContent = facts.join(", ") + ".";
    byId("updates").hidden = updates.length < 2;
    byId("update").replaceChildren(
      ...passesOfRows[row].map((pass) => {
        const option = element("option", passes.updates[pass]);
        option.value = pass;
        option.selected = pass === state.pass;
        return option;
      }),
    );
    byId("prompt-title").textContent = `Prompt, ${rows.prompt_tokens[row]} tokens`;
    byId("prompt").textContent = state.numbers.prompt.map(visible).join("");
    drawTokens();
  }

  function drawTokens() {
    const sections = views.map((name, view) => {
      const section = element("section");
      if (views.length > 1) section.append(element("h3", name));
      state.spans[view] = [];
      section.append(...turnsOfRow().map((turn) => drawTurn(turn, view)));
      return section;
    });
    byId("views").replaceChildren(...sections);
    const hidden = rows.tokens[state.row] - state.shown;
    byId("more").hidden = hidden <= 0;
    byId("more").textContent = `show ${Math.min(hidden, MAX_SHOWN)} more of ${hidden} hidden tokens`;
    colorTokens();
    chooseToken(state.token, false);
  }

  function turnsOfRow() {
    const turns = rows.turns[state.row] || [["policy", rows.tokens[state.row], 0]];
    let end = 0;
    return turns.map(([author, tokens, reward]) => {
      end += tokens;
      return { author, tokens, reward, begin: end - tokens, end: Math.min(end, state.shown) };
    });
  }

  function drawTurn(turn, view) {
    const block = element("div", undefined, turn.author);
    if (rows.turns[state.row]) {
      const reward = turn.reward ? `, reward ${format(turn.reward)}` : "";
      block.append(element("div", `${turn.author}, ${turn.tokens} tokens${reward}`, "turn muted"));
    }
    const text = element("div", undefined, "text");
    for (let token = turn.begin; token < turn.end; token++) {
      const span = element("span", visible(state.numbers.tokens[token]));
      span.dataset.view = view;
      span.dataset.token = token;
      state.spans[view][token] = span;
      text.append(span);
    }
    block.append(text);
    return block;
  }

  // Return the text of a token with its white space visible.
  function visible(index) {
    const text = content.texts[index];
    if (/^ +$/.test(text)) return "␣".repeat(text.length);
    return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
  }

  // ------------------------------------------------------------------------------------------------
  // colours
  function colorTokens() {
    for (let view = 0; view < views.length; view++) {
      const spans = state.spans[view];
      for (let token = 0; token < spans.length; token++) {
        spans[token].className = classOf(view, token);
      }
    }
    drawLegend();
  }

  function classOf(view, token) {
    const flags = state.numbers.flags[token];
    if (!(flags & SAMPLED)) return "token written";
    const bits = valueOf("clip", view, token) || 0;
    const mark = CLIP_MARKS.find(([bit]) => bits & bit);
    let shade = "";
    if (state.quantity.key === "clip") {
      if (state.pass !== null && isInLoss(view, token)) shade = ` shade-${mark ? mark[2] : SHADES}`;
    } else {
      const value = valueOf(state.quantity.key, view, token);
      if (!Number.isNaN(value)) shade = ` shade-${shadeOf(value / state.quantity.scale)}`;
    }
    return "token" + shade + (mark ? ` ${mark[1]}` : "") + (isInLoss(view, token) ? "" : " untrained");
  }

  // Return the colour of a number in units of the scale: 0 (-1 or less) to 10 (1 or more).
  function shadeOf(value) {
    return SHADES + Math.round(Math.max(-1, Math.min(1, value)) * SHADES);
  }

  function drawLegend() {
    const { key, title, about, scale, one_sign: oneSign } = state.quantity;
    const parts = [];
    if (key !== "clip") {
      const swatches = element("span", undefined, "scale");
      for (let shade = oneSign ? SHADES : 0; shade <= 2 * SHADES; shade++) {
        const value = ((shade - SHADES) / SHADES) * scale;
        swatches.append(element("span", String(Number(value.toPrecision(2))), `shade-${shade}`));
      }
      parts.push(swatches);
      const size = oneSign ? title : `|${title}|`;
      parts.push(
        element(
          "span",
          `${title}: ${about}. The strongest colour begins at ${format(scale)}, the 99th ` +
            `percentile of ${size} over the tokens of the step where it is not 0.`,
        ),
      );
    } else {
      parts.push(element("span", `${title}: ${about}.`), legendOf("token shade-5", "not clipped"));
    }
    for (const [bit, mark, shade] of CLIP_MARKS) {
      if (!(content.clip_bits & bit)) continue;
      const color = key === "clip" ? ` shade-${shade}` : "";
      parts.push(legendOf(`token ${mark}${color}`, content.clip_words[bit]));
    }
    if (content.has_untrained) parts.push(legendOf("token untrained", "the policy's, out of the loss"));
    if (content.has_written) parts.push(legendOf("token written", "written by the environment"));
    byId("legend").replaceChildren(...parts);
  }

  function legendOf(className, words) {
    const part = element("span");
    part.append(element("span", "token", className), words);
    return part;
  }

  // ------------------------------------------------------------------------------------------------
  // the numbers of a token
  function chooseToken(token, moveFocus, view = 0) {
    for (const spans of state.spans) {
      if (spans[state.token]) {
        spans[state.token].tabIndex = -1;
        spans[state.token].classList.remove("twin");
      }
      if (!spans[token]) continue;
      spans[token].tabIndex = 0; // the tokens of a view are one stop of the tab key
      if (views.length > 1) spans[token].classList.add("twin");
    }
    state.token = token;
    if (moveFocus) state.spans[view][token].focus();
    drawNumbers();
  }

  function drawNumbers() {
    const { token, numbers } = state;
    const index = numbers.tokens[token];
    const flags = numbers.flags[token];
    const losses = views.filter((_, view) => isInLoss(view, token));
    let author = "in the loss";
    if (!(flags & SAMPLED)) author = "written by the environment";
    else if (!losses.length) author = "out of the loss";
    else if (losses.length < views.length) author = `in the loss of ${losses.join(", ")} alone`;
    const update = state.pass === null ? "no update" : `update ${passes.updates[state.pass]}`;
    const shared = [
      numberOf("token", `${token + 1} of ${rows.tokens[state.row]}`),
      numberOf("text", visible(index).replaceAll("\n", "")),
      numberOf("token id", String(content.token_ids[index])),
      numberOf("", `${update}, ${author}`),
    ];
    for (const quantity of quantities) {
      if (numbers[quantity.key]) {
        shared.push(numberOf(quantity.title, format(valueOf(quantity.key, 0, token))));
      }
    }
    const lines = views.map((name, view) => {
      const parts = views.length > 1 ? [numberOf("", name)] : [];
      for (const key of ["weight", "advantage"]) {
        parts.push(numberOf(key, format(valueOf(key, view, token))));
      }
      for (const { key, title } of quantities) {
        if (key === "pull" || key === "gradient") {
          parts.push(numberOf(title, format(valueOf(key, view, token))));
        }
      }
      const words = clipWords(valueOf("clip", view, token));
      if (words) parts.push(numberOf("", words));
      return lineOfNumbers(parts);
    });
    byId("numbers").replaceChildren(lineOfNumbers(shared), ...lines);
  }

  function lineOfNumbers(parts) {
    const line = element("p");
    parts.forEach((part, i) => line.append(part, i < parts.length - 1 ? ", " : ""));
    return line;
  }

  function numberOf(name, value) {
    const part = element("span", undefined, "number");
    if (name) part.append(name + " ");
    part.append(element("b", value));
    return part;
  }

  function clipWords(bits) {
    if (Number.isNaN(bits)) return "";
    const words = Object.keys(content.clip_words)
      .filter((bit) => bits & bit)
      .map((bit) => content.clip_words[bit]);
    return words.join(", ") || "not clipped";
  }

  // ------------------------------------------------------------------------------------------------
  // the reader's actions
  function drawQuantities() {
    for (const quantity of quantities) {
      const label = element("label");
      const input = element("input");
      input.type = "radio";
      input.name = "quantity";
      input.value = quantity.key;
      input.checked = quantity === state.quantity;
      label.append(input, " " + quantity.title);
      label.title = quantity.about;
      byId("quantities").append(label);
    }
  }

  function listen() {
    byId("quantities").addEventListener("change", (event) => {
      state.quantity = quantities.find((quantity) => quantity.key === event.target.value);
      colorTokens();
      chooseToken(state.token, false);
    });
    byId("rows").addEventListener("click", (event) => {
      const sorting = event.target.closest("th button");
      const line = event.target.closest("tbody tr");
      if (sorting) {
        const key = sorting.dataset.sort;
        const isWords = ["row", "group", "task", "finish", "verdict"].includes(key);
        state.descending = key === state.sort ? !state.descending : !isWords;
        state.sort = key;
        drawList();
      } else if (line) {
        chooseRow(Number(line.dataset.row));
      }
    });
    byId("rows").addEventListener("keydown", (event) => {
      const steps = { ArrowDown: 1, ArrowUp: -1 };
      if (!(event.key in steps) || !event.target.closest("tbody")) return;
      event.preventDefault();
      goBeside(steps[event.key]);
      lineOf(state.row)?.querySelector("button").focus({ preventScroll: true });
    });
    byId("only-group").addEventListener("change", drawList);
    byId("previous").addEventListener("click", () => goBeside(-1));
    byId("next").addEventListener("click", () => goBeside(1));
    byId("update").addEventListener("change", (event) => {
      state.pass = Number(event.target.value);
      drawResponse();
    });
    byId("more").addEventListener("click", () => {
      state.shown += MAX_SHOWN;
      drawTokens();
    });
    const tokenOf = (event) => event.target.closest("[data-token]");
    for (const kind of ["mouseover", "focusin"]) {
      byId("views").addEventListener(kind, (event) => {
        const span = tokenOf(event);
        if (span) chooseToken(Number(span.dataset.token), false);
      });
    }
    byId("views").addEventListener("keydown", (event) => {
      const span = tokenOf(event);
      if (!span) return;
      const token = Number(span.dataset.token);
      const last = state.spans[0].length - 1;
      const targets = { ArrowRight: token + 1, ArrowLeft: token - 1, Home: 0, End: last };
      if (!(event.key in targets)) return;
      event.preventDefault();
      const target = Math.max(0, Math.min(last, targets[event.key]));
      chooseToken(target, true, Number(span.dataset.view));
    });
    window.addEventListener("hashchange", openNamedRow);
  }

  // Open the response that the address names, as in step_000123.html#12.
  function openNamedRow() {
    const row = location.hash.slice(1);
    if (!/^\d{1,9}$/.test(row) || Number(row) >= rowCount) return false;
    chooseRow(Number(row));
    return true;
  }

  drawHead();
  drawList();
  drawQuantities();
  listen();
  byId("page").hidden = false;
  if (!openNamedRow()) chooseRow(state.order[0]);
})();
