# Tab completes groups, options and keys after `quintet` and `.venv/bin/python run.py`, in bash and zsh. In the repository, or with the
# path to it:
#
#     source conf/completion.sh

# Print the choices for the last of the words after the script, each in a line: _quintet_choices PYTHON SCRIPT WORD...
# For the command these are `env quintet`.
_quintet_choices() {
    local python="${1/#\~/$HOME}" script="${2/#\~/$HOME}" line="python run.py"
    shift 2
    while [ $# -gt 1 ]; do
        case "$1" in
            -* | *[!A-Za-z0-9_./=-]*) ;; # flags, prompts and lists: they change no choice, and may not be complete yet
            *=?*) line="$line $1" ;;
        esac
        shift
    done
    # Hydra writes a choice by its type, too: model.dtype=DType.auto
    COMP_LINE="$line $1" "$python" "$script" -sc query=bash 2>/dev/null | tr ' ' '\n' | sed 's/=[A-Z][A-Za-z]*\.\([a-z0-9_]*\)$/=\1/'
}

_quintet_in_bash() {
    local line="${COMP_LINE:0:COMP_POINT}" word choice i=0
    local -a words
    COMPREPLY=()
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    if [[ ${1##*/} == quintet ]]; then
        words[0]="$1"
        set -- env
    else
        while [[ $((++i)) -lt ${#words[@]} && ${words[i]} != *run.py ]]; do :; done
        word="${words[i]/#\~/$HOME}"
        [[ -f ${word%run.py}conf/completion.sh ]] || return # of another program
    fi
    [[ $((i + 1)) -lt ${#words[@]} ]] || return
    word="${words[-1]}"
    while read -r choice; do
        [[ $COMP_WORDBREAKS == *=* ]] && choice="${choice#"${word%"${word##*=}"}"}" # what readline calls the word
        [[ -n $choice ]] && COMPREPLY+=("$choice")
    done < <(_quintet_choices "$1" "${words[@]:i}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} != *[=./] ]] && compopt +o nospace
}

_quintet_in_zsh() {
    local choice i=2 program="${words[1]}"
    local -a whole begun
    if [[ ${program##*/} == quintet ]]; then
        i=1 program=env
    else
        while [[ $i -lt $CURRENT && ${words[i]} != *run.py ]]; do i=$((i + 1)); done
        choice="${words[i]/#\~/$HOME}"
        if [[ $i -ge $CURRENT || ! -f ${choice%run.py}conf/completion.sh ]]; then # another program
            "$_quintet_others"
            return
        fi
    fi
    while read -r choice; do
        case "$choice" in
            *[=./]) begun+=("$choice") ;;
            ?*) whole+=("$choice") ;;
        esac
    done < <(_quintet_choices "$program" "${words[i]}" "${words[@]:$i:$((CURRENT - i - 1))}" "$PREFIX")
    compadd -- "${whole[@]}"
    compadd -S '' -- "${begun[@]}"
    [[ ${#whole[@]} -gt 0 || ${#begun[@]} -gt 0 ]] || { compset -P '*='; _files; }
}

if [ -n "${ZSH_VERSION-}" ]; then
    type compdef >/dev/null 2>&1 || { autoload -Uz compinit && compinit -i; }
    _quintet_others="${_comps[python]:-_default}"
    compdef _quintet_in_zsh python python3 quintet
else
    complete -o nospace -o default -F _quintet_in_bash python python3 quintet
fi
